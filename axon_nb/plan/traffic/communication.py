"""`plan.communication`: the collectives and messages of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch.optim import Optimizer

from axon_nb.parallel.data.units import describe_units
from axon_nb.parallel.strategies import ShardingStrategy
from axon_nb.plan.arguments import STAGE_UNITS, UNSHARDED
from axon_nb.plan.hardware.links import Link
from axon_nb.plan.hardware.presets import resolve_links
from axon_nb.plan.traffic import data_parallel as data
from axon_nb.plan.traffic.data_parallel import LocalTensor
from axon_nb.plan.traffic.layout import ParallelLayout, TrafficOptions
from axon_nb.plan.traffic.pipeline_parallel import pipeline_traffic
from axon_nb.plan.traffic.plan import DATA_AXES, CommunicationPlan, Traffic
from axon_nb.plan.traffic.tensor_parallel import tensor_parallel_traffic


def communication(
    model: Any,
    world_size: int | None = None,
    *,
    links: Link | str | Mapping[str, Link | str] | Any = None,
    optimizer: Callable[..., Optimizer] | str | None = "AdamW",
    **layout: Unpack[TrafficOptions],
) -> CommunicationPlan:
    """Predict the calls and bytes of a training step, by axis and collective, and their time on given links.

        plan.communication(GPTConfig(hidden=1024, blocks=24), 64, strategy="ddp", links="ib-ndr")
        plan.communication(make, mesh={"pp": 2, "dp": 4, "tp": 8}, inputs=make_batch,
                           links={"pp": "ib-ndr", "dp": "ib-ndr", "tp": "nvlink4"})

    Nothing is allocated: the model takes a step on tensors without data. Counts are those of a step that averages
    gradients, from the second step on, with the wrappers of `axon_nb.parallel`.

    Args:
        model: A function without arguments that makes the model, a module, a `GPTConfig`, the name of a model on the
            ranks, or the result of `plan.capture`.
        world_size: Number of ranks; None: the mesh says.
        links: One for all axes, or one per axis: a `Link`, the name of a preset such as ``"nvlink4"``, or the result of
            `calibrate`; or a GPU's name such as ``"h100"``, for hosts of 8. None: no times.
        optimizer: A function that makes it from parameters, or its name in `torch.optim`. With sequence parallelism,
            DTensor all-reduces the gradients of norms each time that the optimizer reads them: three times with AdamW,
            once with SGD or None.
        **layout: The fields of `LayoutOptions`, and those of `TrafficOptions`: bucket_size_mb, broadcast_buffers,
            sequence, parallel_loss, num_stages, at.

    Raises:
        UsageError: the model cannot be built or laid out in this way; the message says what works.
    """
    return traffic_of(ParallelLayout.from_options(model, world_size, layout, optimizer), links)


def traffic_of(layout: ParallelLayout, links: Any) -> CommunicationPlan:
    """Return what a layout sends, with times on links."""
    resolved = resolve_links(links, layout.mesh)
    rows = [row.timed(resolved.get(row.axis)) for row in _rows(layout)]
    return CommunicationPlan(layout.title, layout.mesh, tuple(rows), resolved, tuple(_notes(layout)))


def _notes(layout: ParallelLayout) -> Iterator[str]:
    if not layout.trace.has_inputs:
        yield "inputs= is missing: gradients are assumed to become ready in reverse parameter order"
    if layout.size("tp") > 1 and not layout.styles:
        yield "tp shards no layer of this model, so all tp ranks do the same work; give tp_plan="
    if layout.has_units:
        yield STAGE_UNITS if layout.stages is not None else describe_units(layout.units.values())
    if layout.size(*DATA_AXES) > 1:
        yield "this is a step that averages gradients; accumulation steps send less"
    if layout.stages is not None:
        yield "pipeline ranks receive as much as they send; time is counted at the sender"


def _rows(layout: ParallelLayout) -> Iterator[Traffic]:
    stages, tp = layout.stages, layout.size("tp")
    if layout.styles:
        rows = tuple(
            tensor_parallel_traffic(
                layout.trace,
                layout.styles,
                num_ranks=tp,
                sequence=layout.sequence,
                parallel_loss=layout.parallel_loss,
                parts=stages.num_microbatches if stages is not None else 1,
                stages=stages,
            )
        )
        yield from rows
        if layout.activation_checkpointing:
            yield from _recomputed(rows)
    if layout.size(*DATA_AXES) > 1:
        for pp_rank, here in enumerate(layout.parameters_by_pp_rank):
            for row in _data_rows(layout, here):
                yield replace(row, pp_rank=pp_rank)
    if stages is not None:
        yield from pipeline_traffic(layout.trace, stages, shares=layout.boundary_shares)
        if tp > 1:
            for pp_rank in range(stages.num_ranks):
                yield Traffic("tp", tp, "barrier", "backward", "end of the step", ((0, 1),), pp_rank=pp_rank)


def _recomputed(rows: Sequence[Traffic]) -> Iterator[Traffic]:
    """What forward sends, sent again when backward recomputes it."""
    for row in rows:
        if row.phase == "forward":
            yield replace(row, phase="backward", purpose=f"{row.purpose}, recomputed")


def _data_rows(layout: ParallelLayout, parameters: Sequence[LocalTensor]) -> Iterator[Traffic]:
    axis, num_ranks = layout.data_axis, layout.size(layout.data_axis)
    if layout.strategy in UNSHARDED:
        trace = layout.trace
        buffers = [
            LocalTensor(name, tuple(buffer.shape), buffer.dtype) for name, buffer in trace.model.named_buffers()
        ] * layout.broadcast_buffers
        known = {held.name: held for held in parameters if held.has_grad}
        order = trace.ready if trace.has_inputs else list(known)[::-1]
        ready = [known[name] for name in order if name in known]
        limit = layout.bucket_size_mb * 1024 * 1024
        if layout.strategy == "ddp":
            yield from data.ddp(ready, buffers, axis=axis, num_ranks=num_ranks, bucket_bytes=limit)
        else:
            yield from data.zero1(
                parameters,
                ready,
                buffers,
                axis=axis,
                num_ranks=num_ranks,
                bucket_bytes=limit,
                waits=layout.device == "cpu",
            )
        return
    units = data.group_into_units(list(layout.units), parameters, _needs_backward(layout))
    strategy = ShardingStrategy(layout.strategy)
    shard, replicate = (axis, num_ranks), None
    if strategy is ShardingStrategy.HYBRID_SHARD:
        shard, replicate = ("shard", layout.size("shard")), ("replicate", layout.size("replicate"))
    elif strategy is ShardingStrategy.NO_SHARD:
        shard, replicate = (axis, 1), (axis, num_ranks)
    if layout.stages is not None and strategy is ShardingStrategy.FULL_SHARD:
        strategy = ShardingStrategy.SHARD_GRAD_OP  # pipeline stages keep parameters unsharded until the end of the step
    dtype = layout.mixed_precision
    reduce_dtype = None if dtype is None else torch.float32
    yield from data.fsdp(
        units, strategy, shard=shard, replicate=replicate, param_dtype=dtype, reduce_dtype=reduce_dtype
    )


def _needs_backward(layout: ParallelLayout) -> set[str] | None:
    trace = layout.trace
    if not trace.has_inputs:
        return None
    names: set[str] = trace.cached(
        "units that need backward",
        lambda: {name for name, facts in trace.outputs.items() if any(fact.requires_grad for fact in facts)},
    )
    return names
