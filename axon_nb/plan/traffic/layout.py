"""A layout of a model over a mesh: the styles of its layers, its stages, and each rank's parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch.optim import Optimizer

from axon_nb.errors import UsageError
from axon_nb.parallel.data.units import Wrap, make_units
from axon_nb.parallel.pipeline.schedule import PipelineSchedule, check_counts, default_num_stages, stages_of_rank
from axon_nb.parallel.pipeline.stages import balance, child_costs, split_sections
from axon_nb.parallel.tensor.parallelize import SHARD_DIM, STYLES, automatic_plan, check_divisible
from axon_nb.plan import arguments, muon
from axon_nb.plan.errors import PlanError
from axon_nb.plan.models import model_by_name
from axon_nb.plan.tracing.subject import (
    ModelSource,
    checked_module_filter,
    owner,
    part_costs,
    pipeline_parts,
    resolve_dtype,
    resolve_optimizer,
    split_experts,
)
from axon_nb.plan.tracing.trace import ModelTrace, trace_model
from axon_nb.plan.traffic.plan import GRADIENT_AXES

_TORCH_STYLES = {"ColwiseParallel": "column", "RowwiseParallel": "row", "SequenceParallel": "sequence"}


class LocalTensor(Struct, frozen=True):
    """A parameter or buffer as one data rank holds it before FSDP shards it: its shard over ``tp``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    has_grad: bool = True
    """Whether a step gives it a gradient."""
    requires_grad: bool = True
    """Whether it can get one."""
    is_expert: bool = False
    """Whether ranks along ``ep`` hold other parts of it."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class StageAssignment:
    """How a model is split into stages, and which rank has which."""

    schedule: PipelineSchedule
    num_ranks: int
    num_microbatches: int
    children: tuple[tuple[str, ...], ...]
    """Names of the model's children, per stage; in a model that is not a Sequential, of its `pipeline_parts`."""

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.children)

    def on_rank(self, rank: int) -> list[int]:
        """StageAssignment of a rank."""
        return stages_of_rank(self.schedule, rank, num_ranks=self.num_ranks, num_stages=self.num_stages)

    @cached_property
    def rank_of_stage(self) -> dict[int, int]:
        """The rank of each stage."""
        return {stage: rank for rank in range(self.num_ranks) for stage in self.on_rank(rank)}

    @cached_property
    def _stage_of_child(self) -> dict[str, int]:
        return {name: stage for stage, names in enumerate(self.children) for name in names}

    def stage_of(self, path: str) -> int:
        """The stage that holds a module or parameter; the last one for what is in none."""
        return self._stage_of_child.get(owner(path, self._stage_of_child), self.num_stages - 1)

    def rank_of(self, path: str) -> int:
        """The rank of that stage."""
        return self.rank_of_stage[self.stage_of(path)]


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
        hold = partial(object.__setattr__, self)  # in this order: the last ones read the first
        hold("trace", trace)
        hold("experts", split_experts(trace.model, self.size("ep")))
        hold("wrap", checked_module_filter(trace.model, self.wrap, "wrap"))
        hold("styles", _styles(self) if self.size("tp") > 1 else {})
        hold("stages", _assign_stages(self) if self.size("pp") > 1 else None)

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
        """Each parameter as one rank along ``tp`` and ``ep`` holds it."""
        key = "local parameters", self.size("tp"), tuple(self.styles.items()), self.size("ep")
        parameters: list[LocalTensor] = self.trace.cached(key, lambda: _local_parameters(self))
        return parameters

    @cached_property
    def parameters_by_pp_rank(self) -> list[list[LocalTensor]]:
        """The same, by the rank along ``pp`` that holds them."""
        if self.stages is None:
            return [self.parameters]
        by_rank: list[list[LocalTensor]] = [[] for _ in range(self.size("pp"))]
        for parameter in self.parameters:
            by_rank[self.stages.rank_of(parameter.name)].append(parameter)
        return by_rank

    @property
    def parts(self) -> int:
        """Microbatches in a batch; 1 without a pipeline."""
        return 1 if self.stages is None else self.stages.num_microbatches

    def pp_rank_of(self, path: str) -> int:
        """The rank along ``pp`` that holds a module or parameter."""
        return 0 if self.stages is None else self.stages.rank_of(path)

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


def _styles(layout: ParallelLayout) -> dict[str, str]:
    trace, ranks = layout.trace, layout.size("tp")
    model = trace.model
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


def _assign_stages(layout: ParallelLayout) -> StageAssignment:
    """Split a Sequential as `Pipeline.split` does, and other models into their `pipeline_parts`.

    Raises:
        UsageError: the model has no equal blocks and is not a Sequential, or the numbers do not fit the schedule.
    """
    trace, num_ranks = layout.trace, layout.size("pp")
    kind = PipelineSchedule.of(layout.schedule)
    count = default_num_stages(kind, num_ranks) if layout.num_stages is None else layout.num_stages
    at = [layout.at] if isinstance(layout.at, str) else layout.at
    names = _split_at(trace, at) if at is not None else trace.cached(("stages", count), lambda: _balanced(trace, count))
    microbatches = len(names) if layout.num_microbatches is None else layout.num_microbatches
    check_counts(kind, num_ranks=num_ranks, num_stages=len(names), num_microbatches=microbatches)
    return StageAssignment(kind, num_ranks, microbatches, names)


def _balanced(trace: ModelTrace, count: int) -> tuple[tuple[str, ...], ...]:
    costs: dict[str, float] = trace.cached("costs of stages' parts", lambda: _part_costs(trace))
    names, starts = list(costs), balance(list(costs.values()), count)
    return tuple(tuple(names[first:second]) for first, second in pairwise([*starts, len(names)]))


def _part_costs(trace: ModelTrace) -> dict[str, float]:
    parts = pipeline_parts(trace.model)
    return part_costs(trace.model, parts) if parts else child_costs(trace.model, "params")


def _split_at(trace: ModelTrace, at: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(name for name, _ in part.named_children()) for part in split_sections(trace.model, at))


def _local_parameters(layout: ParallelLayout) -> list[LocalTensor]:
    trace, styles, num_ranks = layout.trace, layout.styles, layout.size("tp")
    ready = set(trace.ready) if trace.has_inputs else None
    parameters = []
    for name, parameter in trace.parameters:
        path, _, leaf = name.rpartition(".")
        shape = list(parameter.shape)
        style = styles.get(path, "")
        if num_ranks > 1 and style in SHARD_DIM:
            dim = _sharded_dim(trace.model.get_submodule(path), style, leaf)
            if dim is not None:
                shape[dim] //= num_ranks
        has_grad = parameter.requires_grad if ready is None else name in ready
        is_expert = bool(shape) and shape[0] == layout.experts.get(path)
        if is_expert:
            shape[0] //= layout.size("ep")
        trained = parameter.requires_grad
        parameters.append(LocalTensor(name, tuple(shape), parameter.dtype, has_grad, trained, is_expert))
    return parameters


def _sharded_dim(module: nn.Module, style: str, leaf: str) -> int | None:
    if isinstance(module, nn.Embedding):
        return 1 - SHARD_DIM[style]
    if leaf == "weight":
        return SHARD_DIM[style]
    return 0 if SHARD_DIM[style] == 0 else None
