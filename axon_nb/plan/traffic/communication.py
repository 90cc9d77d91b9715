"""`plan.communication`: the collectives and messages of a training step of a model laid out over a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch.optim import Optimizer

from axon_nb.parallel.data.units import describe_units
from axon_nb.parallel.memory import ShardingStrategy
from axon_nb.plan import arguments, muon
from axon_nb.plan.hardware import CARDS, FITTED, Link, Shares, link_between, resolve_links
from axon_nb.plan.traffic import parallelism as data
from axon_nb.plan.traffic.layout import LocalTensor, ParallelLayout, TrafficOptions
from axon_nb.plan.traffic.muon import step_traffic
from axon_nb.plan.traffic.parallelism import pipeline_traffic, tensor_parallel_traffic
from axon_nb.plan.traffic.plan import GRADIENT_AXES, CommunicationPlan, Traffic
from axon_nb.plan.traffic.tokens import expert_traffic, ring_traffic


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
    rows = list(_rows(layout))
    resolved = joined_links(links, resolve_links(links, layout.mesh), layout.mesh, rows)
    timed = tuple(row.timed(resolved.get(row.axis)) for row in rows)
    return CommunicationPlan(layout.title, layout.mesh, timed, resolved, tuple(_notes(layout)))


def joined_links(
    links: Any, known: Mapping[str, Link], mesh: Mapping[str, int], rows: Sequence[Traffic], shares: Shares = FITTED
) -> dict[str, Link]:
    """Add the links of groups along several axes: between cards that of the group's ranks, else the slowest axis's.

    Args:
        links: As a user gives them.
        known: What `resolve_links` returned.
        mesh: Size by axis.
        rows: The communication.
        shares: What links achieve of their bandwidth.
    """
    found = dict(known)
    for group in dict.fromkeys(row.axis for row in rows if "+" in row.axis and known):
        axes = group.split("+")
        if isinstance(links, str) and links.lower() in CARDS:
            found[group] = link_between(CARDS[links.lower()], _ranks_along(mesh, axes), shares)
        else:
            found[group] = min((known[axis] for axis in axes), key=lambda link: link.bandwidth_bytes_per_s)
    return found


def _ranks_along(mesh: Mapping[str, int], axes: Sequence[str]) -> list[int]:
    """Ranks of the group along some axes that has rank 0."""
    ranks, stride = [0], 1
    for axis, size in reversed(list(mesh.items())):
        if axis in axes:
            ranks = [place * stride + rank for place in range(size) for rank in ranks]
        stride *= size
    return ranks


def _notes(layout: ParallelLayout) -> Iterator[str]:
    if not layout.trace.has_inputs:
        yield "inputs= is missing: gradients are assumed to become ready in reverse parameter order"
    if layout.size("tp") > 1 and not layout.styles:
        yield "tp shards no layer of this model, so all tp ranks do the same work; give tp_plan="
    if layout.has_units:
        yield arguments.STAGE_UNITS if layout.stages is not None else describe_units(layout.units.values())
    if layout.size(*GRADIENT_AXES) > 1:
        yield "this is a step that averages gradients; accumulation steps send less"
    if layout.experts:
        yield "every expert gets as many tokens; experts are sharded as a unit of their own"
    if layout.size("cp") > 1:
        yield "keys and values go round the ring of cp once in forward, and once in backward with their gradients"
    if layout.matrices:
        yield muon.NOTE
    if layout.stages is not None:
        yield "pipeline ranks receive as much as they send; time is counted at the sender"


def _rows(layout: ParallelLayout) -> Iterator[Traffic]:
    rows = tuple(tensor_parallel_traffic(layout)) if layout.styles else ()
    if layout.experts:
        rows += tuple(expert_traffic(layout))
    if layout.size("cp") > 1:
        rows += tuple(ring_traffic(layout))
    yield from rows
    if layout.activation_checkpointing:
        yield from _recomputed(rows)
    for pp_rank, here in enumerate(layout.parameters_by_pp_rank):
        if layout.size(*GRADIENT_AXES) > 1:
            for row in _data_rows(layout, here):
                yield replace(row, pp_rank=pp_rank)
        yield from step_traffic(layout, pp_rank)
    if layout.stages is not None:
        yield from pipeline_traffic(layout)
        if (tp := layout.size("tp")) > 1:
            for pp_rank in range(layout.stages.num_ranks):
                yield Traffic("tp", tp, "barrier", "backward", "end of the step", ((0, 1),), pp_rank=pp_rank)


def _recomputed(rows: Sequence[Traffic]) -> Iterator[Traffic]:
    """What forward sends, sent again when backward recomputes it."""
    for row in rows:
        if row.phase == "forward":
            overlaps = "backward" if row.overlaps_with else ""
            yield replace(row, phase="backward", purpose=f"{row.purpose}, recomputed", overlaps_with=overlaps)


def _data_rows(layout: ParallelLayout, parameters: Sequence[LocalTensor]) -> Iterator[Traffic]:
    for experts in (False, True):
        held = [parameter for parameter in parameters if parameter.is_expert is experts]
        if held and layout.gradient_group(experts=experts)[1] > 1:
            yield from _group_rows(layout, held, experts)


def _group_rows(layout: ParallelLayout, parameters: Sequence[LocalTensor], experts: bool) -> Iterator[Traffic]:
    axis, num_ranks = layout.gradient_group(experts=experts)
    if layout.strategy in arguments.UNSHARDED:
        trace = layout.trace
        buffers = [
            LocalTensor(name, tuple(buffer.shape), buffer.dtype) for name, buffer in trace.model.named_buffers()
        ] * (layout.broadcast_buffers and not experts)
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
    shard: tuple[str, int] = (axis, num_ranks)
    replicate: tuple[str, int] | None = None
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
