"""Write `docs/plan_published.md`: published training runs, what the planner predicts for them, and how far off it is.

`--check` only says whether it is up to date.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Sequence

from axon_nb.plan.hardware import CARDS, FITTED
from scripts.generated_page import ROOT, write_or_check
from scripts.published_memory import NEAR as NEAR_MEMORY
from scripts.published_memory import MemoryRow, peak_rows, zero_rows
from scripts.published_steps import Run, error_of, is_fitted, is_near, load_runs, predicted

TARGET = ROOT / "docs" / "plan_published.md"
SOURCES = {
    "titan-h100": "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 to 6",
    "titan-405b": "torchtitan, docs/performance.md of late 2024, Llama 3.1 405B",
    "titan-h200": "torchtitan, benchmarks/llama3_8b_h200_2025-06_torchtitan.md",
    "titan-a100": "torchtitan, docs/performance.md of 2024 (041336434916), Llama 2 and 3 on 64 A100",
    "fsdp-7b": "PyTorch blog, Maximizing training throughput using PyTorch FSDP, 2024",
    "llama3": "Llama Team, The Llama 3 Herd of Models, arXiv 2407.21783, table 4 (not opened again)",
    "korthikanti": (
        "Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198, table 5 "
        "(not opened again)"
    ),
    "narayanan": (
        "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, arXiv 2104.04473, table 1 "
        "(not opened again)"
    ),
    "nemo": ("NVIDIA/NeMo, docs/source/performance/performance_summary.md (070a0bb168d4), NeMo 24.07"),
    "bridge": "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md (00b7660be025), 25.11, on H100",
    "automodel": (
        "NVIDIA-NeMo/Automodel, docs/performance-summary.md (01926a5c443b) of October 2025, with its files in "
        "examples/benchmark/configs; every expert gets as many tokens"
    ),
    "megatron-experts": (
        "NVIDIA/Megatron-LM, megatron/core/transformer/moe/README.md (022bcb5afe88): the reference mapping of v0.8 for "
        "Mixtral 8x7B, and the 438 TFLOPS that its text gives for v0.8"
    ),
    "mosaic-h100": (
        "mosaicml/llm-foundry, scripts/train/benchmarking/README.md (061f2c7ce64e), H100 80GB BF16, 1B to 70B, 2048 to "
        "8192 tokens"
    ),
    "mosaic-a100": "the same, A100 80GB; its 70B runs keep parameters in bfloat16 and are left out",
    "fms-fsdp": "foundation-model-stack/fms-fsdp, README.md (0d319983c4b3)",
    "olmo": "ai2-olmo-core 1.4.0, README, with its scripts OLMo-7B.py and OLMo-13B.py, BF16",
    "zero": "Rajbhandari et al., ZeRO, 2020, figure 1",
}
HEAD = """\
# The planner against published runs

`python -m scripts.plan_published` writes this page from [published/runs.csv](published/runs.csv) and the planner;
`tests/plan/test_published.py` checks it.

{summary}
{new_axes}

A prediction is within 20 % if it and the published time differ by a factor of at most 1.2, in either direction. Every
row is what `plan.step_time` answers; `arguments_of` in `scripts/published_steps.py` gives its arguments: the mesh and
the strategy, `compiled=`, `activation_checkpointing=`, `num_microbatches=`, `gradient_accumulation=`, and the card's
name as `rates=` and `links=`.

| half | steps | within 20 % | median factor | worst |
|---|---:|---:|---:|---:|
{halves}

The halves share no model of the same source. Nothing is fitted to runs in which ranks share experts or a sequence.

## Assumptions

`python -m scripts.published_fit` fits all of these together to one half of the runs and writes them into
`axon_nb/plan/fitted.toml`. Each source counts equally.

- Matrix products achieve a fraction of the datasheet's peak, by card and dtype: the table below.
- All other operations move the bytes of their operands and results, counted one by one, at {shares.other:.0%} of the
  memory's bandwidth. If they are fused, by `torch.compile` or by hand, {shares.compiled:.0%} of the bytes remain.
- With float8, linear layers alone compute in it: attention takes twice the time of such products.
- Attention counts all scores. Its kernels skip the half that a causal mask hides, and reach about half the rate of
  matrix products. Megatron's papers are of before FlashAttention: their models write the scores.
- Within a host, collectives get {shares.nvlink:.0%} of NVLink's bandwidth; between hosts, {shares.network:.0%} of a
  port's. 100 % is the largest value allowed: these runs hide more of their communication than the planner does. A group
  with several ranks per host uses as many ports, up to NVLink's bandwidth. Messages also take the latencies of NCCL's
  own model.
- All communication of data parallelism that can overlap with computation is hidden, up to the computation's length.
  That of tensor parallelism and of experts is not. Where a sequence is split, keys and values travel while ranks
  compute, and their gradients do not.

| card | peak, TFLOP/s | achieved |
|---|---:|---:|
{cards}

## Steps

Worst first. The error is that of the predicted time. `fit` marks the half to which the assumptions are fitted. Layouts
are data x tensor x pipeline parallel, with stages per rank if several; `cp` ranks share a sequence, and `ep` of the
data ranks share experts. `AC` is the part of forward that backward recomputes. The last column says what the source
does not: a run may differ from the row in it. The first row's cause is unknown: its source gives 121 TFLOP/s a GPU,
and `automodel` 277 for the same model on 8 GPUs in bfloat16.

| source | model | card | layout | AC | published | predicted | error | half | assumed |
|---|---|---|---|---:|---:|---:|---:|---|---|
{steps}

## Memory

{memory_summary}

Every row is what `plan.memory` answers (`scripts/published_memory.py`). torchtitan publishes what the allocator
reserves, so its rows are `reserved_bytes`: the peak with 5 % for fragmentation, and the gradients, which stay in the
pool of the stream in which FSDP reduces them. The models of these rows checkpoint as torchtitan does: all of a block,
or all but attention and every second matrix product. Operations that `torch.compile` fuses are planned one by one, and
float8 as bfloat16. From 2025 the compiled loss is fused too, so it keeps no float32 logits. All peaks are
predicted too low; those of eager runs and of the long sequence most, for a reason that is not known.

| source | what | published | predicted | error |
|---|---|---:|---:|---:|
{memory}

## Sources

A number in parentheses is the commit that was read.

{sources}

## What is not compared

Peaks with tensor parallelism: torchtitan shards the sequence and the loss too, which `plan.memory` does not. Runs in
which experts are shared across tensor-parallel ranks, as those of Qwen3 235B: in `mesh=`, `ep` is an axis of its own.
Runs on H800, B200 and GB200, and those whose sources name no layout.
"""


def memory_rows() -> list[MemoryRow]:
    """Return the published amounts of memory, worst first."""
    return sorted((*peak_rows(), *zero_rows()), key=lambda row: -abs(row.error))


def _memory_summary() -> str:
    """One sentence that says how accurate predicted peaks are."""
    errors = [abs(row.error) for row in peak_rows()]
    near = sum(error <= NEAR_MEMORY for error in errors)
    return (
        f"Of {len(errors)} published peaks, all of one model, {near} are predicted within {NEAR_MEMORY:.0%}; the worst "
        f"is off by {max(errors):.0%}."
    )


def summary(runs: Sequence[Run]) -> str:
    """Return one sentence that says how accurate the predicted steps are; README.md repeats it."""
    kept = [run for run in runs if not (is_fitted(run) or run.has_new_axes)]
    near, worst = _accuracy(kept)
    return (
        f"Of {len(kept)} published training steps that nothing was fitted to, {near:.0%} are predicted within 20 %, "
        f"and the worst is off by a factor of {worst:.2f}."
    )


def new_axes(runs: Sequence[Run]) -> str:
    """Return one sentence about the runs in which ranks share experts or a sequence."""
    new = [run for run in runs if run.has_new_axes]
    near, worst = _accuracy(new)
    return (
        f"Of {len(new)} more in which ranks share experts or a sequence, {round(near * len(new))} are predicted within "
        f"20 %, and the worst is off by a factor of {worst:.2f}."
    )


def _accuracy(runs: Sequence[Run]) -> tuple[float, float]:
    """The share of predictions that are near, and the largest factor between a prediction and its run."""
    return statistics.fmean(is_near(run) for run in runs), math.exp(max(abs(error_of(run)) for run in runs))


def _halves(runs: Sequence[Run]) -> Iterator[str]:
    old, new = ([run for run in runs if run.has_new_axes is kind] for kind in (False, True))
    halves = {
        "fitted to": [run for run in old if is_fitted(run)],
        "kept aside": [run for run in old if not is_fitted(run)],
        "experts or a sequence shared, kept aside": new,
    }
    for name, half in halves.items():
        (near, worst), middle = _accuracy(half), math.exp(statistics.median(map(error_of, half)))
        yield f"| {name} | {len(half)} | {near:.0%} | {middle:.2f} | {worst:.2f} |"


def _steps(runs: Sequence[Run]) -> Iterator[str]:
    for run in sorted(runs, key=lambda run: -abs(error_of(run))):
        stages = f" x {run.virtual} stages" if run.virtual > 1 else ""
        shared = "".join(f", {axis} {size}" for axis, size in (("cp", run.cp), ("ep", run.ep)) if size > 1)
        cells = (
            run.source,
            run.model,
            run.card + (", fused" if run.fused else ""),
            f"{run.gpus} = {run.dp} x {run.tp} x {run.pp}{stages}{shared}",
            f"{run.recompute:g}",
            f"{run.step_s:.3g} s",
            f"{predicted(run).total_s:.3g} s",
            f"{math.exp(error_of(run)) - 1:+.0%}",
            "fit" if is_fitted(run) else "",
            run.assumed,
        )
        yield f"| {' | '.join(cells)} |"


def render() -> str:
    """Return the page."""
    runs, rows = load_runs(), memory_rows()
    return HEAD.format(
        summary=summary(runs),
        new_axes=new_axes(runs),
        halves="\n".join(_halves(runs)),
        shares=FITTED,
        cards="\n".join(
            f"| {card.what} (`{card.name}`) | {card.tera_flops:g} | {card.achieved:.0%} |"
            for card in CARDS.values()
            if not card.assumption
        ),
        steps="\n".join(_steps(runs)),
        memory_summary=_memory_summary(),
        memory="\n".join(
            f"| {row.source} | {row.what} | {row.published:.4g} {row.unit} | {row.predicted:.4g} {row.unit} "
            f"| {row.error:+.1%} |"
            for row in rows
        ),
        sources="\n".join(f"- `{name}`: {text}" for name, text in SOURCES.items()),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page."""
    return write_or_check(TARGET, render, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
