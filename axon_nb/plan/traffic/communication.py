"""`plan.communication`: the collectives and messages of a training step of a model laid out over a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from axon_nb.errors import UsageError
from axon_nb.parallel.data.units import Wrap, describe_units, make_units
from axon_nb.parallel.memory import ShardingStrategy
from axon_nb.parallel.pipeline.schedule import PipelineSchedule
from axon_nb.parallel.tensor.parallelize import STYLES, automatic_plan, check_divisible
from axon_nb.plan import arguments, muon
from axon_nb.plan.errors import PlanError
from axon_nb.plan.hardware import CARDS, FITTED, Link, Shares, link_between, resolve_links
from axon_nb.plan.models import model_by_name
from axon_nb.plan.tracing.subject import (
    ModelSource,
    checked_module_filter,
    owner,
    resolve_dtype,
    resolve_optimizer,
    split_experts,
)
from axon_nb.plan.tracing.trace import ModelTrace, trace_model
from axon_nb.plan.traffic import parallelism as data
from axon_nb.plan.traffic.muon import step_traffic
from axon_nb.plan.traffic.parallelism import (
    LocalTensor,
    StageAssignment,
    assign_stages,
    local_parameters,
    pipeline_traffic,
    tensor_parallel_traffic,
)
from axon_nb.plan.traffic.plan import GRADIENT_AXES, CommunicationPlan, Traffic
from axon_nb.plan.traffic.tokens import expert_traffic, ring_traffic

_TORCH_STYLES = {"ColwiseParallel": "column", "RowwiseParallel": "row", "SequenceParallel": "sequence"}


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
    stages, tp = layout.stages, layout.size("tp")
    parts = stages.num_microbatches if stages is not None else 1
    rows: tuple[Traffic, ...] = ()
    if layout.styles:
        rows = tuple(
            tensor_parallel_traffic(
                layout.trace,
                layout.styles,
                num_ranks=tp,
                sequence=layout.sequence,
                parallel_loss=layout.parallel_loss,
                parts=parts,
                positions=layout.size("cp"),
                stages=stages,
            )
        )
    if layout.experts:
        rows += tuple(
            expert_traffic(
                layout.trace,
                layout.experts,
                num_ranks=layout.size("ep"),
                parts=parts,
                positions=layout.size("cp"),
                stages=stages,
            )
        )
    if layout.size("cp") > 1:
        shares = {name: tp for name in layout.trace.attention if layout.divides_part(name)}
        rows += tuple(
            ring_traffic(layout.trace, num_ranks=layout.size("cp"), parts=parts, stages=stages, shares=shares)
        )
    yield from rows
    if layout.activation_checkpointing:
        yield from _recomputed(rows)
    for pp_rank, here in enumerate(layout.parameters_by_pp_rank):
        if layout.size(*GRADIENT_AXES) > 1:
            for row in _data_rows(layout, here):
                yield replace(row, pp_rank=pp_rank)
        yield from step_traffic(layout, pp_rank)
    if stages is not None:
        yield from pipeline_traffic(layout.trace, stages, shares=layout.boundary_shares, positions=layout.size("cp"))
        if tp > 1:
            for pp_rank in range(stages.num_ranks):
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


class TrafficOptions(arguments.LayoutOptions, total=False):
    """Keyword arguments of `communication` and `step_time`; `inputs` is needed with ``tp``, ``pp`` and for times."""

    bucket_size_mb: float
    """Size of the gradient buckets in MiB, as in `DDP`; default 25."""
    broadcast_buffers: bool
    """As in `DDP`; default True."""
    sequence: bool
    """As in `parallelize`; default False."""
    parallel_loss: bool
    """Whether the loss is `parallel_cross_entropy`."""
    num_stages: int | None
    """As in `Pipeline.split`."""
    at: Sequence[str] | None
    """As in `Pipeline.split`: children that start a stage."""


@dataclass(frozen=True)
class ParallelLayout:
    """A layout and what follows from it. Fields without a docstring are those of `TrafficOptions`."""

    source: ModelSource
    mesh: Mapping[str, int]
    strategy: str = "full_shard"
    mixed_precision: torch.dtype | None = None
    wrap: Wrap = None
    bucket_size_mb: float = 25.0
    broadcast_buffers: bool = True
    tp_plan: Any = "auto"
    sequence: bool = False
    parallel_loss: bool = False
    schedule: PipelineSchedule | str = PipelineSchedule.ONE_F_ONE_B
    num_microbatches: int | None = None
    num_stages: int | None = None
    at: Sequence[str] | None = None
    device: str = "cuda"
    optimizer: Callable[..., Optimizer] | None = None
    """Its step is traced too."""
    activation_checkpointing: bool | float = False
    """Fraction of forward that backward recomputes; True: the equal blocks save only their inputs."""
    num_batches: int = 1
    """Batches whose gradients a step accumulates."""
    known_trace: ModelTrace | None = None
    """The trace, if it exists already."""
    trace: ModelTrace = field(init=False)
    """One step of the whole model on one rank's batch."""
    styles: Mapping[str, str] = field(init=False)
    """Tensor-parallel style by module name."""
    stages: StageAssignment | None = field(init=False)
    """How the model is split over ``pp``; None: it is not."""
    experts: Mapping[str, int] = field(init=False)
    """Number of experts of each module that ``ep`` splits."""

    def __post_init__(self) -> None:
        trace = self.known_trace or trace_model(self.source, optimizer=self.optimizer, dtype=self.mixed_precision)
        if self.size("tp", "pp", "ep", "cp") > 1 and not trace.has_inputs:
            raise UsageError(
                "tp, pp, ep and cp send activations, so inputs= is required: one rank's batch, such as "
                "torch.zeros(8, 128, dtype=torch.int64)."
            )
        experts = split_experts(trace.model, self.size("ep"))
        wrap = checked_module_filter(trace.model, self.wrap, "wrap")
        styles = _styles(trace, self) if self.size("tp") > 1 else {}
        stages = None
        if self.size("pp") > 1:
            stages = assign_stages(
                trace,
                num_ranks=self.size("pp"),
                schedule=self.schedule,
                num_microbatches=self.num_microbatches,
                num_stages=self.num_stages,
                at=self.at,
            )
        found = {"trace": trace, "wrap": wrap, "styles": styles, "stages": stages, "experts": experts}
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_options(
        cls,
        model: Any,
        world_size: int | None,
        options: Mapping[str, Any],
        optimizer: Callable[..., Optimizer] | str | None = None,
        **fields: Any,
    ) -> ParallelLayout:
        """Make the layout that a user describes.

        Args:
            model: The same as in `communication`.
            world_size: Number of ranks; None: the mesh says.
            options: Fields of `TrafficOptions`.
            optimizer: A function that makes it from parameters, or its name in `torch.optim`; its step is traced.
            **fields: Fields of `ParallelLayout` that users do not set.

        Raises:
            UsageError: an option is unknown or invalid, or the model cannot be laid out in this way.
        """
        arguments.check_options(
            options, tuple(TrafficOptions.__annotations__), named=("world_size", "links", "optimizer")
        )
        rest = dict(options)
        subject = {name: rest.pop(name) for name in ("inputs", "target", "loss", "batch", "seq") if name in rest}
        strategy = arguments.choice_value(rest.pop("strategy", "full_shard")).lower()
        mesh = arguments.resolve_mesh(world_size, rest.pop("mesh", None), strategy)
        rest["mixed_precision"] = resolve_dtype(rest.pop("mixed_precision", None))
        _check_values(options, mesh)
        source = ModelSource(model_by_name(model), **subject)
        make = resolve_optimizer(optimizer)
        if strategy == "optimizer_state" and muon.is_muon(make):
            raise PlanError(muon.NOT_ZERO_1)
        return cls(source, mesh, strategy, optimizer=make, **rest, **fields)

    def size(self, *axes: str) -> int:
        """Product of the sizes of these axes; a missing axis counts as 1."""
        return math.prod(self.mesh.get(axis, 1) for axis in axes)

    @cached_property
    def matrices(self) -> frozenset[str]:
        """Names of the parameters that Muon updates; empty: it is another optimizer."""
        return muon.matrix_names(self.trace.model) if muon.is_muon(self.optimizer) else frozenset()

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each whole parameter."""
        return {name: tuple(parameter.shape) for name, parameter in self.trace.parameters}

    @cached_property
    def parameters(self) -> list[LocalTensor]:
        """Each parameter as one rank along ``tp`` holds it."""
        return local_parameters(self.trace, self.styles, self.size("tp"), self.experts, self.size("ep"))

    @cached_property
    def parameters_by_pp_rank(self) -> list[list[LocalTensor]]:
        """The same, by the rank along ``pp`` that holds them."""
        if self.stages is None:
            return [self.parameters]
        by_rank: list[list[LocalTensor]] = [[] for _ in range(self.size("pp"))]
        for parameter in self.parameters:
            by_rank[self.stages.rank_of(parameter.name)].append(parameter)
        return by_rank

    @cached_property
    def _divided(self) -> tuple[frozenset[str], frozenset[str]]:
        """Modules whose matrix products ``tp`` divides, as their parents or themselves; and parts that hold any."""
        named = frozenset(self.styles) | frozenset(name.rpartition(".")[0] for name in self.styles) - {""}
        return named, frozenset(owner(name, self.trace.parts) for name in self.styles)

    def divides(self, path: str) -> bool:
        """Whether ``tp`` divides a module's matrix products: it is sharded, or a module beside or below it is."""
        return bool(self.styles) and not self._divided[0].isdisjoint((path, path.rpartition(".")[0]))

    def divides_part(self, path: str) -> bool:
        """Whether ``tp`` shards a module of the same block, or of the same child of the model."""
        return bool(self.styles) and owner(path, self.trace.parts) in self._divided[1]

    @cached_property
    def boundary_shares(self) -> dict[str, int]:
        """Number of ``tp`` ranks over which a child's output is sharded, by child; others are whole on each rank."""
        children = [name for name, _ in self.trace.model.named_children()][:-1]
        return dict.fromkeys(children, self.size("tp")) if self.sequence and self.styles else {}

    @property
    def has_units(self) -> bool:
        """Whether the model is sharded by FSDP."""
        return self.strategy not in arguments.UNSHARDED and self.size(*GRADIENT_AXES) > 1

    @cached_property
    def units(self) -> dict[str, nn.Module]:
        """Modules that are FSDP units of their own, by name."""

        def named() -> dict[str, nn.Module]:
            model = self.trace.model
            if self.stages is None:
                inner = make_units(model, self.wrap)
            else:
                parts = [model.get_submodule(name) for names in self.stages.children for name in names]
                inner = [part for part in parts if any(True for _ in part.parameters())]
            selected = set(map(id, inner))
            return {name: module for name, module in model.named_modules() if id(module) in selected}

        key = "units", self.stages is None
        modules: dict[str, nn.Module] = named() if self.wrap is not None else self.trace.cached(key, named)
        return modules

    def gradient_group(self, *, experts: bool = False) -> tuple[str, int]:
        """Axes over which gradients are averaged, joined by ``+``, and their size; the first one with hybrid_shard.

        Args:
            experts: Those of experts, of which ranks along ``ep`` hold others.
        """
        if self.strategy == "hybrid_shard":
            return "replicate", self.size("replicate")
        axes = [axis for axis in ("dp", "ep", "cp") if self.size(axis) > 1 and not (experts and axis == "ep")]
        return "+".join(axes) or "dp", self.size(*axes)

    @property
    def title(self) -> str:
        """Model and layout as text."""
        shown = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        parts = [f"{type(self.trace.model).__name__} on {shown}"]
        if self.size(*GRADIENT_AXES) > 1:
            parts.append(self.strategy)
        if self.stages is not None:
            parts.append(f"{self.stages.schedule.value} with {self.stages.num_microbatches} microbatches")
        if self.num_batches > 1:
            parts.append(f"{self.num_batches} accumulated batches")
        if self.sequence and self.size("tp") > 1:
            parts.append("sequence parallel")
        return ", ".join(parts)


def _check_values(options: Mapping[str, Any], mesh: Mapping[str, int]) -> None:
    """Check option values that nothing else checks.

    Raises:
        PlanError: one is invalid.
    """
    for name in ("batch", "seq", "num_microbatches", "num_stages"):
        if (value := options.get(name)) is not None or (name == "batch" and name in options):
            arguments.check_int(name, value)
            if name in ("num_microbatches", "num_stages") and mesh.get("pp", 1) == 1:
                raise PlanError(f"{name}={value} requires a pipeline: add a pp axis, mesh={{'pp': 4, …}}.")
    limit = options.get("bucket_size_mb", 25.0)
    arguments.check_number("bucket_size_mb", limit, rule="a number of MiB above 0", least=1e-9)
    arguments.check_choice("device", options.get("device", "cuda"), ("cpu", "cuda"))
    arguments.check_callable("loss", options.get("loss"), "of the output (and the target, if there is one) to a scalar")


def _styles(trace: ModelTrace, layout: ParallelLayout) -> dict[str, str]:
    model, ranks = trace.model, layout.size("tp")
    if layout.tp_plan == "auto":
        sequence, loss = layout.sequence, layout.parallel_loss
        styles: dict[str, str] = trace.cached(
            ("styles", ranks, sequence, loss),
            lambda: automatic_plan(model, num_ranks=ranks, sequence=sequence, parallel_loss=loss)[0],
        )
        return styles
    if not isinstance(layout.tp_plan, Mapping):
        raise UsageError(f"tp_plan must be 'auto', or map module name patterns to styles; got {layout.tp_plan!r}.")
    names = [name for name, _ in model.named_modules() if name]
    assigned: dict[str, str] = {}
    for pattern, style in layout.tp_plan.items():
        word = style if isinstance(style, str) else _TORCH_STYLES.get(type(style).__name__, "")
        if word not in STYLES:
            raise UsageError(f"tp_plan[{pattern!r}] must be one of {', '.join(STYLES)}; got {style!r}.")
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            raise UsageError(f"tp_plan[{pattern!r}] matches no module of {type(model).__name__}.")
        assigned |= dict.fromkeys(hits, word)
    for name, word in assigned.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        check_divisible(name, model.get_submodule(name), word, parent=parent, num_ranks=ranks)
    return assigned
