"""Published training steps, and what the planner predicts for them."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from axon_nb.plan.hardware import CARDS, FITTED, Shares, links_of_card
from axon_nb.plan.timing import StepTime, predict_step, step_time_of
from axon_nb.plan.traffic.communication import joined_links, traffic_of
from axon_nb.plan.traffic.layout import ParallelLayout
from axon_nb.plan.traffic.plan import CommunicationPlan
from scripts.generated_page import ROOT
from scripts.published_models import MODELS, TP_PLAN, trace_of

NEAR = 1.2
"""Factor within which predicted and published seconds count as near."""
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
    cp: int
    ep: int
    strategy: str
    seq: int
    batch: int
    microbatches: int
    """Of a pipeline."""
    accumulated: int
    """Batches whose gradients a step accumulates."""
    recompute: float
    """Fraction of forward that backward computes again."""
    fused: bool
    """Whether elementwise operations are compiled, or in kernels written for it."""
    unit: str
    value: float
    """The published figure."""
    assumed: str
    """What the source does not say."""

    @property
    def dp(self) -> int:
        """Ranks with samples of their own, of which each `ep` share the experts."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def has_new_axes(self) -> bool:
        """Whether ranks share experts, or a sequence."""
        return self.cp * self.ep > 1

    @property
    def step_s(self) -> float:
        """Seconds of the published step."""
        tokens = self.batch * self.accumulated * self.seq * self.dp
        if self.unit == "s":
            return self.value
        if self.unit == "tokens/s":
            return tokens / self.gpus / self.value
        return tokens * self._flops_per_token() / (self.gpus * self.value * 1e12)

    def _flops_per_token(self) -> float:
        sizes = MODELS[self.model]
        if sizes.gated:  # 6 per parameter that a token uses, and causal attention
            named = list(trace_of(sizes, 1, self.seq).model.named_parameters())
            stacked = [p.numel() for _, p in named if sizes.experts and p.ndim == 3]
            parameters = sum(p.numel() for _, p in named) - sum(stacked)
            used = sum(stacked) * sizes.top_k / max(1, sizes.experts)
            return 6.0 * (parameters + used) + 6.0 * sizes.blocks * sizes.hidden * self.seq
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
            *(int(row[name]) for name in ("gpus", "tp", "pp", "virtual", "cp", "ep")),
            row["strategy"],
            *(int(row[name]) for name in ("seq", "batch", "microbatches", "accumulated")),
            float(row["recompute"]),
            row["fused"] == "yes",
            row["unit"],
            float(row["value"]),
            row["assumed"],
        )
        for number, row in enumerate(rows)
    )


def is_fitted(run: Run) -> bool:
    """Whether a run is in the half that assumptions are fitted to; the other half checks them.

    Runs of one model from one source are in the same half, because they differ little. Nothing is fitted to runs with
    axes for experts or context.
    """
    if run.has_new_axes:
        return False
    groups = list(dict.fromkeys((one.source, one.model) for one in load_runs()))
    return groups.index((run.source, run.model)) % 2 == 0


def arguments_of(run: Run) -> dict[str, Any]:
    """Return the keyword arguments of `plan.step_time` for a run, besides its model, inputs and loss."""
    mesh: dict[str, int] = {"pp": run.pp} if run.pp > 1 else {}
    if run.strategy == "hybrid_shard":  # within hosts
        mesh |= {"replicate": run.dp // 8, "shard": 8}
    else:
        mesh["dp"] = run.dp // run.ep
        mesh |= {axis: size for axis, size in (("ep", run.ep), ("cp", run.cp)) if size > 1}
    found: dict[str, Any] = {
        "mesh": mesh | ({"tp": run.tp} if run.tp > 1 else {}),
        "strategy": run.strategy,
        "mixed_precision": torch.bfloat16,
        "optimizer": partial(torch.optim.AdamW, fused=True),
        "rates": run.card,
        "links": run.card,
        "compiled": run.fused,
        "activation_checkpointing": True if run.recompute == 1 else run.recompute,
        "gradient_accumulation": run.accumulated,
    }
    if run.tp > 1:
        found["tp_plan"] = TP_PLAN
    if run.pp > 1:
        found |= {
            "schedule": "Interleaved1F1B" if run.virtual > 1 else "1F1B",
            "num_microbatches": run.microbatches,
            "num_stages": run.pp * run.virtual,
        }
    return found


@cache
def _laid_out(run: Run) -> tuple[ParallelLayout, CommunicationPlan]:
    given = arguments_of(run)
    for name in ("rates", "links", "compiled"):
        del given[name]
    layout = ParallelLayout.from_options(
        None,
        None,
        given,
        given.pop("optimizer"),
        activation_checkpointing=given.pop("activation_checkpointing"),
        num_batches=given.pop("gradient_accumulation"),
        known_trace=trace_of(MODELS[run.model], run.batch, run.seq),
    )
    return layout, traffic_of(layout, run.card)


@cache
def predicted(run: Run) -> StepTime:
    """Return what `plan.step_time` predicts; one block is traced and the others are copies of it."""
    return step_time_of(_laid_out(run)[0], rates=run.card, links=run.card, compiled=run.fused)


def predicted_s(run: Run, shares: Shares = FITTED) -> float:
    """Return the seconds of a step if cards and links achieved these shares of their datasheets' figures."""
    layout, traffic = _laid_out(run)
    card = CARDS[run.card]
    card = replace(card, achieved=shares.achieved[family_of(run)])
    rates = card.rates_with(shares)
    if run.fused:
        rates = rates.compiled(shares.compiled)
    links = joined_links(run.card, links_of_card(card, layout.mesh, shares), layout.mesh, traffic.rows, shares)
    rows = tuple(row.timed(links.get(row.axis)) for row in traffic.rows)
    return predict_step(layout, replace(traffic, rows=rows, links=links), rates, 1.0).total_s


def family_of(run: Run) -> str:
    """Return the card whose share a run is fitted to: H200s have the same matrix units as H100s."""
    return run.card.replace("h200", "h100")


def error_of(run: Run) -> float:
    """Return the logarithm of predicted over published seconds."""
    return math.log(predicted(run).total_s / run.step_s)


def is_near(run: Run) -> bool:
    """Whether predicted and published seconds differ by a factor of at most 1.2."""
    return abs(error_of(run)) <= math.log(NEAR)
