"""Write `docs/plan_published.md`: published training runs, what the planner predicts for them, and how far off it is.

`--check` only says whether it is up to date.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from axon_nb.parallel.memory import model_states
from axon_nb.parallel.strategies import ShardingStrategy
from axon_nb.plan.hardware.cards import CARDS, COMPILED_SHARE, NETWORK_SHARE, NVLINK_SHARE, OTHER_SHARE
from scripts.generated_page import ROOT, write_or_check
from scripts.published_models import MODELS, trace_of
from scripts.published_steps import Run, is_fitted, load_runs, predicted_s

__all__ = ["MemoryRow", "main", "memory_rows", "render", "summary"]

TARGET = ROOT / "docs" / "plan_published.md"
SOURCES = {
    "titan-h100": "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 to 6, no context parallelism",
    "titan-405b": "torchtitan, docs/performance.md of late 2024, Llama 3.1 405B",
    "titan-h200": "torchtitan, benchmarks/llama3_8b_h200_2025-06_torchtitan_trainy_whitefiber.md",
    "titan-a100": "torchtitan, docs/performance.md of 2024, Llama 2 and 3 on 64 A100",
    "fsdp-7b": "PyTorch blog, Maximizing training throughput using PyTorch FSDP, 2024",
    "llama3": "Llama Team, The Llama 3 Herd of Models, 2024, table 4",
    "korthikanti": "Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, table 5",
    "narayanan": "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, table 1",
    "nemo": "NVIDIA NeMo Framework user guide 24.12, performance benchmarks (without context parallelism)",
    "zero": "Rajbhandari et al., ZeRO, 2020, figure 1",
}
GB, GIB = 1e9, 1024.0**3

HEAD = """\
# The planner against published runs

`python -m scripts.plan_published` writes this page from [published/runs.csv](published/runs.csv) and the planner;
`tests/plan/test_published.py` checks it.

{summary}

What cards achieve is fitted to one half of the runs and checked on the other. The halves share no model of the same
source, except for cards with a single group of runs.

## Assumptions

One set per card, in `axon_nb/plan/hardware/cards.py`:

- Matrix products achieve a fraction of the datasheet's peak, by card and dtype: the table below.
- All other operations move the bytes of their operands and results, counted one by one, at {other:g} times the memory's
  bandwidth. The factor is above 1 because caches hold part of them, and because the runs used fused norms and
  optimizers. If they are fused, by `torch.compile` or by hand, {compiled:.0%} of the bytes remain.
- Attention counts all scores. Its kernels skip the half that a causal mask hides, and reach about half the rate of
  matrix products.
- Within a host, collectives get {nvlink:.0%} of NVLink's bandwidth; between hosts, {network:.0%} of a port's. A group
  with several ranks per host uses as many ports, up to NVLink's bandwidth. Messages also take the latencies of NCCL's
  own model.
- All communication of data parallelism that can overlap with computation is hidden, up to the computation's length.
  That of tensor parallelism is not.

| card | peak, TFLOP/s | achieved |
|---|---:|---:|
{cards}

## Steps

Worst first. The error is that of the predicted time. `fit` marks the half to which the assumptions are fitted. Layouts
are data x tensor x pipeline parallel, with stages per rank if several. `AC` is the part of forward that backward
recomputes.

| source | model | card | layout | AC | published | predicted | error | half |
|---|---|---|---|---:|---:|---:|---:|---|
{steps}

## Memory

| source | what | published | predicted | error |
|---|---|---:|---:|---:|
{memory}

## Sources

{sources}

Pipelines of torchtitan run 8 microbatches, its default at the time. Batches of the Megatron tables are split into
microbatches of one sample where there is a pipeline; the paper does not give their size. Llama 3 runs 8 stages of one
layer per rank.

## What is not compared

Runs with context parallelism, which `axon_nb` does not have. Whole peaks of torchtitan's runs: they recompute selected
operations and are compiled, which the simulator does not follow.
"""


@dataclass(frozen=True)
class MemoryRow:
    """A published amount of memory, and the planner's."""

    source: str
    what: str
    published: float
    predicted: float
    unit: str

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.published - 1


def memory_rows() -> list[MemoryRow]:
    """Return the published amounts of memory."""
    linears = [((10_000, 1_000), torch.bfloat16)] * 750

    def zero(strategy: ShardingStrategy) -> float:
        # 16-bit parameters and gradients, and 12 bytes of float32 states per parameter: 6 elements of 16 bits.
        return model_states(linears, strategy, world_size=64, states_per_param=6).total_bytes / GB

    rows = [
        MemoryRow("zero", "7.5B parameters on 64 GPUs, baseline", 120.0, zero(ShardingStrategy.NO_SHARD), "GB"),
        MemoryRow("zero", "the same, ZeRO-1", 31.4, zero(ShardingStrategy.OPTIMIZER_STATE), "GB"),
        MemoryRow("zero", "the same, ZeRO-3", 1.88, zero(ShardingStrategy.FULL_SHARD), "GB"),
    ]
    shapes = [(tuple(p.shape), p.dtype) for p in trace_of(MODELS["Llama 3.1 8B"], 2, 8192).model.parameters()]
    on_8, on_128 = (
        model_states(shapes, ShardingStrategy.FULL_SHARD, world_size=size).total_bytes / GIB for size in (8, 128)
    )
    for what, eight, many in (("eager", 82.4, 67.0), ("compiled", 77.0, 62.0), ("float8", 76.8, 61.8)):
        name = f"Llama 3.1 8B, {what}: extra memory on 8 GPUs compared with 128"
        rows.append(MemoryRow("titan-h100", name, eight - many, on_8 - on_128, "GiB"))
    return sorted(rows, key=lambda row: -abs(row.error))


def summary(runs: Sequence[Run]) -> str:
    """Return one sentence that says how accurate the predicted steps are."""
    errors = {run: predicted_s(run) / run.step_s - 1 for run in runs}
    kept = [error for run, error in errors.items() if not is_fitted(run)]
    near = statistics.fmean(abs(error) <= 0.2 for error in errors.values())
    near_kept = statistics.fmean(abs(error) <= 0.2 for error in kept)
    worst = max((max(1 + error, 1 / (1 + error)) for error in errors.values()), default=1.0)
    return (
        f"Of {len(runs)} published steps, {near:.0%} are predicted within 20 %, and so are {near_kept:.0%} of those "
        f"that were not used for fitting; the worst is off by a factor of {worst:.2f}."
    )


def _steps(runs: Sequence[Run]) -> Iterator[str]:
    found = [(predicted_s(run), run) for run in runs]
    for seconds, run in sorted(found, key=lambda pair: -abs(pair[0] / pair[1].step_s - 1)):
        stages = f" x {run.virtual} stages" if run.virtual > 1 else ""
        cells = (
            run.source,
            run.model,
            run.card + (", fused" if run.fused else ""),
            f"{run.gpus} = {run.dp} x {run.tp} x {run.pp}{stages}",
            f"{run.recompute:g}",
            f"{run.step_s:.3g} s",
            f"{seconds:.3g} s",
            f"{seconds / run.step_s - 1:+.0%}",
            "fit" if is_fitted(run) else "",
        )
        yield f"| {' | '.join(cells)} |"


def render() -> str:
    """Return the page."""
    runs = load_runs()
    cards = {run.card for run in runs}
    return HEAD.format(
        summary=summary(runs),
        other=OTHER_SHARE,
        compiled=COMPILED_SHARE,
        nvlink=NVLINK_SHARE,
        network=NETWORK_SHARE,
        cards="\n".join(
            f"| {card.what} (`{name}`) | {card.tera_flops:g} | {card.achieved:.0%} |"
            for name, card in CARDS.items()
            if name in cards
        ),
        steps="\n".join(_steps(runs)),
        memory="\n".join(
            f"| {row.source} | {row.what} | {row.published:.4g} {row.unit} | {row.predicted:.4g} {row.unit} "
            f"| {row.error:+.1%} |"
            for row in memory_rows()
        ),
        sources="\n".join(f"- `{name}`: {text}" for name, text in SOURCES.items()),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page."""
    return write_or_check(TARGET, render, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
