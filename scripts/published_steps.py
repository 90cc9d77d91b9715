"""Published training steps and what the planner predicts for them; fits what a card achieves to half of them."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from axon_nb.plan.hardware.cards import COMPILED_SHARE, GPUS
from axon_nb.plan.timing.step_time import predict_step, uncertainty_of
from axon_nb.plan.tracing.subject import ModelSource
from axon_nb.plan.traffic.communication import traffic_of
from axon_nb.plan.traffic.layout import ParallelLayout
from axon_nb.plan.traffic.plan import CommunicationPlan
from scripts.generated_page import ROOT
from scripts.published_models import MODELS, TP_PLAN, trace_of

__all__ = ["RUNS", "Run", "fitted_shares", "interval_s", "is_fitted", "load_runs", "predicted_s"]

RUNS = ROOT / "docs" / "published" / "runs.csv"


@dataclass(frozen=True)
class Run:
    """A published step. `batch` is that of one data-parallel rank."""

    number: int
    """Its line among the runs."""
    source: str
    model: str
    card: str
    gpus: int
    tp: int
    pp: int
    virtual: int
    strategy: str
    seq: int
    batch: int
    microbatches: int
    recompute: float
    """Fraction of forward that backward computes again."""
    fused: bool
    """Whether elementwise operations are compiled, or in kernels written for it."""
    unit: str
    value: float
    """The published figure."""

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.gpus // (self.tp * self.pp)

    @property
    def step_s(self) -> float:
        """Seconds of the published step."""
        tokens = self.batch * self.seq * self.dp
        if self.unit == "s":
            return self.value
        if self.unit == "tokens/s":
            return tokens / self.gpus / self.value
        return tokens * self._flops_per_token() / (self.gpus * self.value * 1e12)

    def _flops_per_token(self) -> float:
        sizes = MODELS[self.model]
        if sizes.gated:  # 6 per parameter, and causal attention
            parameters = sum(p.numel() for p in trace_of(sizes, 1, self.seq).model.parameters())
            return 6.0 * parameters + 6.0 * sizes.blocks * sizes.hidden * self.seq
        # Narayanan et al., 2021, appendix: with full recomputation.
        blocks, hidden = sizes.blocks, sizes.hidden
        return 96 * blocks * hidden**2 * (1 + self.seq / (6 * hidden) + sizes.vocab / (16 * blocks * hidden))


@cache
def load_runs() -> tuple[Run, ...]:
    """Return all runs."""
    with RUNS.open() as file:
        rows = list(csv.DictReader(file))
    return tuple(
        Run(
            number,
            row["source"],
            row["model"],
            row["card"],
            *(int(row[name]) for name in ("gpus", "tp", "pp", "virtual")),
            row["strategy"],
            *(int(row[name]) for name in ("seq", "batch", "microbatches")),
            float(row["recompute"]),
            row["fused"] == "yes",
            row["unit"],
            float(row["value"]),
        )
        for number, row in enumerate(rows)
    )


def is_fitted(run: Run) -> bool:
    """Whether a run is in the half that assumptions are fitted to; the other half checks them.

    Runs of one model from one source are in the same half, because they differ little.
    """
    groups = list(dict.fromkeys((one.source, one.model) for one in load_runs()))
    return groups.index((run.source, run.model)) % 2 == 0


@cache
def _laid_out(run: Run) -> tuple[ParallelLayout, CommunicationPlan]:
    mesh = {"pp": run.pp, "dp": run.dp, "tp": run.tp}
    layout = ParallelLayout(
        ModelSource(None),
        {axis: size for axis, size in mesh.items() if size > 1 or axis == "dp"},
        run.strategy,
        mixed_precision=torch.bfloat16,
        tp_plan=TP_PLAN,
        schedule="Interleaved1F1B" if run.virtual > 1 else "1F1B",
        num_microbatches=run.microbatches if run.pp > 1 else None,
        num_stages=run.pp * run.virtual if run.pp > 1 else None,
        activation_checkpointing=run.recompute,
        known_trace=trace_of(MODELS[run.model], run.batch, run.seq),
    )
    return layout, traffic_of(layout, run.card)


def predicted_s(run: Run, achieved: float | None = None) -> float:
    """Return the seconds that the planner predicts.

    Args:
        run: The run.
        achieved: Fraction of the card's peak that matrix products achieve, relative to the card's; None: 1.
    """
    layout, traffic = _laid_out(run)
    rates = GPUS[run.card]
    if run.fused:
        rates = rates.compiled(COMPILED_SHARE)
    if achieved is not None:
        rates = replace(rates, flops_per_s=rates.flops_per_s * achieved)
    return predict_step(layout, traffic, rates, 1.0).total_s


def interval_s(run: Run) -> tuple[float, float]:
    """Return the range of seconds in which the planner expects the step."""
    layout, traffic = _laid_out(run)
    rates = GPUS[run.card].compiled(COMPILED_SHARE) if run.fused else GPUS[run.card]
    found = uncertainty_of(predict_step(layout, traffic, rates, 1.0), layout, rates, 1.0)
    return found.low_s, found.high_s


def fitted_shares(runs: Iterable[Run]) -> Mapping[str, float]:
    """Return, by card, the factor on its matrix products' rate that brings the median error of these runs to zero.

    H200s have the same matrix units as H100s, so their runs count for these.
    """
    by_card: dict[str, list[Run]] = {}
    for run in runs:
        by_card.setdefault(run.card.replace("h200", "h100"), []).append(run)
    found = {}
    for card, own in by_card.items():
        low, high = 0.5, 2.0
        for _ in range(12):
            middle = math.sqrt(low * high)
            errors = [math.log(predicted_s(run, middle) / run.step_s) for run in own]
            low, high = (middle, high) if statistics.median(errors) > 0 else (low, middle)
        found[card] = math.sqrt(low * high)
    return found
