"""`plan.step_time`: how long a training step takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Unpack

from torch.optim import Optimizer

from axon_nb.errors import UsageError
from axon_nb.plan.arguments import ZERO_2, check_int, check_number
from axon_nb.plan.hardware.cards import FITTED
from axon_nb.plan.hardware.links import Link
from axon_nb.plan.hardware.presets import resolve_rates
from axon_nb.plan.hardware.rates import Rates
from axon_nb.plan.pipeline.plan import SchedulePlan
from axon_nb.plan.tables import format_flops
from axon_nb.plan.timing.compute import (
    compute_work,
    copy_work,
    optimizer_work,
    pipeline_schedule,
    wrapper_s,
    wrapper_s_per_parameter,
)
from axon_nb.plan.timing.plan import StepTime
from axon_nb.plan.timing.uncertainty import Uncertainty, estimate_uncertainty
from axon_nb.plan.traffic.communication import traffic_of
from axon_nb.plan.traffic.layout import ParallelLayout, TrafficOptions
from axon_nb.plan.traffic.plan import DATA_AXES, CommunicationPlan, Traffic
from axon_nb.records.units import format_bytes


def step_time(
    model: Any,
    world_size: int | None = None,
    *,
    rates: Rates | float | str | Any,
    links: Link | str | Mapping[str, Link | str] | Any = None,
    overlap: float | None = None,
    optimizer: Callable[..., Optimizer] | str | None = "AdamW",
    activation_checkpointing: bool | float = False,
    compiled: bool = False,
    cuda_graphs: bool = False,
    gradient_accumulation: int = 1,
    **layout: Unpack[TrafficOptions],
) -> StepTime:
    """Predict a step's time: compute, exposed communication, and the pipeline bubble.

        plan.step_time(GPTConfig(hidden=1024, blocks=24), 64, batch=8, rates="h100", links="h100")
        here = plan.calibrate(model=small, inputs=batch, optimizer=torch.optim.AdamW)   # on ranks
        plan.step_time(large, 2, inputs=batch, rates=here, links=here, strategy="ddp")

    Args:
        model: The same as in `communication`.
        world_size: Number of ranks; None: the mesh says.
        rates: FLOP/s that a rank reaches in its compute dtype; `Rates`, which cover other operations too; a GPU's name
            such as ``"h100"``, for what published runs achieve with it; or the result of `calibrate`.
        links: The same as in `communication`; a GPU's name stands for hosts of 8 with NVLink and one network port per
            GPU.
        overlap: Fraction of overlappable communication that computation hides, 0 to 1; None: as `calibrate` measured,
            or 1.
        optimizer: A function that makes it from parameters, or its name in `torch.optim`; None: no optimizer step.
        activation_checkpointing: True: backward recomputes the forward of the model's equal blocks; or a fraction of
            the whole forward, 0 to 1.
        compiled: Whether `torch.compile` fuses what is not a matrix product: fewer bytes move, and fewer operations are
            issued.
        cuda_graphs: Whether CUDA graphs replay the step, as by ``torch.compile(mode="reduce-overhead")``: the host
            launches one graph per phase, of each microbatch in pipelines, instead of each operation.
        gradient_accumulation: Batches per step: each runs forward and backward, and the last one's backward averages
            the gradients (`accumulating`). A pipeline accumulates its ``num_microbatches`` instead.
        **layout: The same as in `communication`; ``inputs`` is required except for a GPTConfig.

    Raises:
        UsageError: the model cannot be built or laid out in this way, or rates or links are missing; the message says
            what works.
    """
    again = activation_checkpointing
    if not isinstance(again, bool):
        again = check_number("activation_checkpointing", again, rule="True, False or a fraction of forward", most=1.0)
    laid_out = ParallelLayout.from_options(
        model,
        world_size,
        layout,
        optimizer,
        activation_checkpointing=again,
        num_batches=check_int("gradient_accumulation", gradient_accumulation),
    )
    return step_time_of(laid_out, rates=rates, links=links, overlap=overlap, compiled=compiled, cuda_graphs=cuda_graphs)


def step_time_of(
    layout: ParallelLayout,
    *,
    rates: Any,
    links: Any = None,
    overlap: float | None = None,
    compiled: bool = False,
    cuda_graphs: bool = False,
) -> StepTime:
    """Predict the time of a layout's step.

    Args:
        layout: A layout with its optimizer.
        rates: The same as in `step_time`.
        links: The same as in `step_time`.
        overlap: The same as in `step_time`.
        compiled: The same as in `step_time`.
        cuda_graphs: The same as in `step_time`.

    Raises:
        UsageError: the layout has no inputs, pipelines accumulate batches, or rates or links are missing.
    """
    found, share = resolve_rates(rates), _overlap(overlap, rates, links)
    if compiled:
        found = found.compiled(FITTED.compiled)
    if cuda_graphs:
        found = replace(found, is_graphed=True)
    if not layout.trace.has_inputs:
        raise UsageError(
            "inputs= is required, because the time of a step depends on the batch: for example torch.zeros(8, 64)."
        )
    if layout.stages is not None and layout.num_batches > 1:
        raise UsageError(
            "A pipeline accumulates gradients over its microbatches: give num_microbatches= instead of "
            "gradient_accumulation=."
        )
    traffic = traffic_of(layout, links)
    if traffic.rows and not traffic.links:
        raise UsageError(
            "links= is required, because ranks communicate: a preset such as 'nvlink4', a Link(…), or the result of "
            "plan.calibrate()."
        )
    step = predict_step(layout, traffic, found, share)
    return replace(step, uncertainty=uncertainty_of(step, layout, found, share))


def uncertainty_of(step: StepTime, layout: ParallelLayout, rates: Rates, overlap: float) -> Uncertainty:
    """Return how a step depends on its assumptions.

    Args:
        step: Predicted by `predict_step` with the other arguments.
        layout: The same as in `predict_step`.
        rates: The same as in `predict_step`.
        overlap: The same as in `predict_step`.
    """

    def seconds(changed: Rates, links: Mapping[str, Link], hidden: float) -> float:
        rows = tuple(row.timed(links.get(row.axis)) for row in step.communication.rows)
        return predict_step(layout, replace(step.communication, rows=rows, links=links), changed, hidden).total_s

    return estimate_uncertainty(seconds, rates, step.communication.links, overlap)


def predict_step(
    layout: ParallelLayout,
    traffic: CommunicationPlan,
    rates: Rates,
    overlap: float,
    *,
    plan: SchedulePlan | None = None,
) -> StepTime:
    """Predict a layout's step.

    Args:
        layout: A layout with its optimizer.
        traffic: Its communication, with times.
        rates: Rates of one rank.
        overlap: Fraction of overlappable communication that computation hides, 0 to 1.
        plan: The pipeline schedule, if known: it does not depend on the strategy.
    """
    if layout.stages is not None and plan is None:
        plan = pipeline_schedule(layout, traffic, rates)
    found = [
        _parts(layout, traffic, rates, overlap=overlap, pp_rank=pp_rank, plan=plan) for pp_rank in traffic.pp_ranks
    ]
    slowest = max(traffic.pp_ranks, key=lambda pp_rank: sum(found[pp_rank].values()))
    work = compute_work(layout, slowest)
    return StepTime(
        layout.title,
        found[slowest],
        layout.num_batches * sum(phase.flops for phase in work.values()),
        (*_assumptions(layout, rates, overlap), *_unknown(layout, rates, sum(found[slowest].values()))),
        traffic,
        plan,
    )


def _parts(
    layout: ParallelLayout,
    traffic: CommunicationPlan,
    rates: Rates,
    *,
    overlap: float,
    pp_rank: int,
    plan: SchedulePlan | None,
) -> dict[str, float]:
    """Seconds per part, of one rank along ``pp``."""
    work, batches = compute_work(layout, pp_rank), layout.num_batches
    parts = {f"compute, {phase}": batches * rates.seconds(done, phase) for phase, done in work.items()}
    step = optimizer_work(layout, pp_rank)
    if step.ops:
        parts["compute, optimizer"] = rates.seconds(step, "optimizer")
    if extra := rates.seconds(copy_work(layout, traffic, pp_rank), "") + wrapper_s(layout, rates, pp_rank):
        parts["copies and wrapper"] = extra
    for phase in ("forward", "backward", "optimizer"):
        # The schedule includes what a pipeline sends between stages, and over tp within them.
        rows = [
            row for row in traffic.select(phase=phase, pp_rank=pp_rank) if plan is None or row.axis not in ("pp", "tp")
        ]
        computing = parts.get(f"compute, {phase}", 0.0) / batches
        exposed = _exposed_s(rows, computing, overlap)
        if batches > 1 and phase in work:
            exposed += (batches - 1) * _exposed_s([row for row in rows if not row.once], computing, overlap)
        if exposed:
            parts[f"communication, {phase}"] = exposed
    if plan is not None:
        inside = sum(row.seconds or 0.0 for row in traffic.select(axis="tp", pp_rank=pp_rank))
        if inside:
            parts["communication, within stages"] = inside
        parts["bubble and messages"] = plan.step_s - plan.busy_s[pp_rank]
    return parts


def _exposed_s(rows: Iterable[Traffic], computing_s: float, overlap: float) -> float:
    """Seconds of communication that one pass's computation does not hide."""
    rows = list(rows)
    covered = sum(row.seconds or 0.0 for row in rows if row.overlaps_with)
    return sum(row.seconds or 0.0 for row in rows) - overlap * min(covered, computing_s)


def _assumptions(layout: ParallelLayout, rates: Rates, overlap: float) -> Iterator[str]:
    moving = "other operations are free"
    if rates.bytes_per_s is not None:
        moving = f"other operations {format_bytes(round(rates.bytes_per_s))}/s"
        moving += f" and {1e6 * rates.launch_s:.3g} us per launch" if rates.launch_s else ""
    yield f"rates ({rates.source}): {format_flops(rates.flops_per_s)}, {moving}"
    if rates.is_graphed:
        yield "the host launches one CUDA graph per phase; the operations in it follow each other without gaps"
    elif rates.issue_s:
        yield (
            f"the host issues an operation in {1e6 * rates.issue_s:.3g} us (assumed), which is hidden where computing "
            "takes longer; CUDA graphs avoid it: cuda_graphs=True"
        )
    if rates.factors:
        factors = ", ".join(f"{phase} {factor:.3g}" for phase, factor in rates.factors.items())
        yield f"scaled by the measured model's factors: {factors}"
    if layout.size(*DATA_AXES) > 1:
        wrapper = wrapper_s_per_parameter(rates, layout.strategy)
        known = "its wrapper is free" if wrapper is None else f"its wrapper {1e6 * wrapper:.3g} us per parameter"
        if layout.strategy == "shard_grad_op":
            yield ZERO_2
        yield f"{layout.strategy} copies what it sends at the rate of other operations; {known}"
        yield (
            f"{overlap:.0%} of overlappable communication is hidden, up to the computation's length: all gradients but "
            "the last bucket or unit, and all FSDP gathers but the first unit"
        )
    if layout.size("tp") > 1:
        yield (
            "tp divides the matrix products that it shards, and the other operations of their blocks, evenly; none of "
            "its communication is hidden"
        )
    if layout.num_batches > 1:
        yield (
            f"{layout.num_batches} batches are accumulated: only the last one's gradients are averaged; the "
            "communication shown is that of its pass"
        )
    if layout.stages is not None:
        yield "a microbatch takes its share of the batch's time; senders do not wait for delivery"
    yield "all ranks are equally fast and otherwise idle; data loading is free"


def _unknown(layout: ParallelLayout, rates: Rates, total_s: float) -> Iterator[str]:
    """Name the operations whose FLOPs are unknown, if their bytes alone take 1 % of the step."""
    limit = 0.01 * total_s * rates.bytes_per_s if rates.bytes_per_s else 0.0
    names = sorted(name for name, moved in layout.trace.unknown.items() if moved >= limit)
    if names:
        yield f"only the bytes of {', '.join(names)} are counted: their FLOPs are unknown, so the step takes longer"


def _overlap(given: float | None, *calibrations: Any) -> float:
    if given is None:
        return float(next((c.overlap for c in calibrations if hasattr(c, "overlap")), 1.0))
    return check_number("overlap", given, rule="a fraction from 0 (nothing is hidden) to 1", most=1.0)
