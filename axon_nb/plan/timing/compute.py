"""The work of one rank of a layout in a step, and its pipeline schedule."""

from __future__ import annotations

import math

from axon_nb.plan.hardware.rates import Rates, Work
from axon_nb.plan.pipeline.plan import SchedulePlan, StageTimes
from axon_nb.plan.pipeline.schedule import schedule
from axon_nb.plan.tracing.model_parts import owner
from axon_nb.plan.traffic.layout import ParallelLayout
from axon_nb.plan.traffic.pipeline_parallel import boundaries
from axon_nb.plan.traffic.plan import DATA_AXES, CommunicationPlan

_PHASES = ("forward", "backward")
_COPIED = ("all_gather", "all_reduce", "reduce_scatter")


def compute_work(layout: ParallelLayout, pp_rank: int) -> dict[str, Work]:
    """Return the forward and backward work of a rank's whole batch.

    Args:
        layout: The layout.
        pp_rank: The rank along ``pp``.
    """
    stages = layout.stages
    if stages is None:
        return {phase: _of_modules(layout, phase, None) for phase in _PHASES}
    work = {phase: Work() for phase in _PHASES}
    for stage in stages.on_rank(pp_rank):
        for phase in _PHASES:
            work[phase] += _of_stage(layout, stage, phase).times(stages.num_microbatches)
    return work


def _of_modules(layout: ParallelLayout, phase: str, stage: int | None) -> Work:
    """The work in one stage; None: of the whole model."""
    total = _sum(layout, phase, stage)
    if layout.activation_checkpointing and phase == "backward":
        blocks_only = layout.activation_checkpointing is True
        total += _sum(layout, "forward", stage, blocks_only=blocks_only).times(float(layout.activation_checkpointing))
    return total


def _sum(layout: ParallelLayout, phase: str, stage: int | None, *, blocks_only: bool = False) -> Work:
    """The work of one rank along ``tp``: matrix products are divided where their module is, the rest with its part."""
    tp, trace, stages = layout.size("tp"), layout.trace, layout.stages
    children = None if stages is None or stage is None else stages.children
    key = phase, children, stage, blocks_only, tp, frozenset(layout.styles.items())
    if key not in trace.sums:
        total = Work()
        for path, work in trace.work.get(phase, {}).items():
            if (stages is None or stage is None or stages.stage_of(path) == stage) and (
                not blocks_only or owner(path, trace.blocks)
            ):
                shares = [
                    1 / tp if is_divided else 1.0 for is_divided in (layout.divides(path), layout.divides_part(path))
                ]
                total += work.scaled(*shares)
        trace.sums[key] = total
    return trace.sums[key]


def _of_stage(layout: ParallelLayout, stage: int, phase: str) -> Work:
    """The work of one microbatch in one stage; the last stage includes the loss."""
    assert layout.stages is not None
    return _of_modules(layout, phase, stage).scaled(1 / layout.stages.num_microbatches)


def optimizer_work(layout: ParallelLayout, pp_rank: int) -> Work:
    """Return the work of the optimizer's step on one rank.

    Args:
        layout: The layout.
        pp_rank: The rank along ``pp``.
    """
    whole = layout.trace.total("optimizer")
    trained = layout.trace.cached("trained parameters", lambda: set(layout.trace.ready))
    total = layout.trace.cached(
        "sizes of trained parameters", lambda: [p.numel() for name, p in layout.trace.parameters if name in trained]
    )
    here = [p for p in layout.parameters_by_pp_rank[pp_rank] if p.name in trained]
    if not total:
        return whole
    elements = sum(math.prod(p.shape) for p in here) / sum(total)
    count = len(here) / len(total)
    num_shards = {"ddp": 1, "no_shard": 1, "hybrid_shard": layout.size("shard")}
    sharded = num_shards.get(layout.strategy, layout.size(layout.data_axis))
    calls = (
        sharded if layout.strategy == "optimizer_state" else 1
    )  # it assigns whole parameters to ranks instead of splitting them
    return Work(whole.flops * elements / sharded, whole.bytes * elements / sharded, whole.ops * count / calls)


def copy_work(layout: ParallelLayout, traffic: CommunicationPlan, pp_rank: int) -> Work:
    """Return the work of data parallelism's copies into and out of communication buffers.

    DDP copies gradients into buckets and back; FSDP2 copies parameters out of the gathered buffer, and gradients into
    the reduced one (`split_with_sizes_copy` and `chunk_cat` of torch.distributed.fsdp). Each copy is a read and a
    write.

    Args:
        layout: The layout.
        traffic: Its communication.
        pp_rank: The rank along ``pp``.
    """
    accesses = 4 if layout.strategy == "ddp" else 2
    rows = [
        (row, 1 if row.once or row.phase == "optimizer" else layout.num_batches)
        for row in traffic.select(pp_rank=pp_rank)
        if row.axis in DATA_AXES and row.operation in _COPIED
    ]
    return Work(
        bytes=float(accesses * sum(times * row.bytes for row, times in rows)),
        ops=float(sum(times * row.calls for row, times in rows)),
    )


def wrapper_s(layout: ParallelLayout, rates: Rates, pp_rank: int) -> float:
    """Return the seconds of a step that the strategy's wrapper itself takes.

    Args:
        layout: The layout.
        rates: Rates of one rank.
        pp_rank: The rank along ``pp``.
    """
    if layout.size(*DATA_AXES) == 1:
        return 0.0
    return (wrapper_s_per_parameter(rates, layout.strategy) or 0.0) * len(layout.parameters_by_pp_rank[pp_rank])


def wrapper_s_per_parameter(rates: Rates, strategy: str) -> float | None:
    """Return seconds per parameter of the strategy's wrapper, or of a similar one; None: not measured."""
    alike = "ddp" if strategy in ("ddp", "optimizer_state") else "full_shard"
    return rates.wrappers.get(strategy, rates.wrappers.get(alike))


def pipeline_schedule(layout: ParallelLayout, traffic: CommunicationPlan, rates: Rates) -> SchedulePlan:
    """Return the pipeline schedule with the times of its stages and messages.

    Args:
        layout: A layout with stages.
        traffic: Its communication, with times.
        rates: Rates of one rank.
    """
    stages = layout.stages
    assert stages is not None
    link = traffic.links.get("pp")
    delays = [
        [link.seconds("send", size, 2) if link and size else 0.0 for size in sizes]
        for sizes in boundaries(layout.trace, stages, shares=layout.boundary_shares)
    ]
    times = []
    for stage in range(stages.num_stages):
        pp_rank = stages.rank_of_stage[stage]
        seconds = []
        for phase in _PHASES:
            inside = sum(row.seconds or 0.0 for row in traffic.select(axis="tp", phase=phase, pp_rank=pp_rank))
            inside /= stages.num_microbatches * len(stages.on_rank(pp_rank))
            seconds.append(rates.seconds(_of_stage(layout, stage, phase), phase) + inside)
        times.append(StageTimes(*seconds))
    return schedule(
        stages.schedule,
        stages.num_stages,
        stages.num_microbatches,
        times,
        num_ranks=stages.num_ranks,
        latency_s=[forward for forward, _ in delays],
        backward_latency_s=[backward for _, backward in delays],
    )
