"""A model laid out over a world, as far as its communication and its compute time depend on that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, TypedDict

import torch
from torch.optim import Optimizer

from axon_nb.errors import UsageError
from axon_nb.parallel.pipeline.schedule import PipelineSchedule
from axon_nb.parallel.strategies import ShardingStrategy
from axon_nb.parallel.tensor.recognise import automatic_plan
from axon_nb.parallel.tensor.styles import STYLES, check_divisible
from axon_nb.parallel.units import Wrap
from axon_nb.plan.asked_numbers import check_callable, real_number, whole_number
from axon_nb.plan.capture_named import by_name
from axon_nb.plan.communication_data import Held
from axon_nb.plan.communication_pipeline import Stages, stages_for
from axon_nb.plan.communication_tensor import local_parameters
from axon_nb.plan.errors import PlanError
from axon_nb.plan.mesh_axes import one_of, resolved_mesh
from axon_nb.plan.module_kinds import kinds_in
from axon_nb.plan.step_time_model import Given
from axon_nb.plan.step_time_trace import ModelTrace, trace_model

__all__ = ["DATA_AXES", "Layout", "LayoutOptions", "dtype_of", "optimizer_of"]

DATA_AXES = ("replicate", "dp", "shard")
"""Axes along which ranks have different samples."""
_TORCH_STYLES = {"ColwiseParallel": "column", "RowwiseParallel": "row", "SequenceParallel": "sequence"}


class LayoutOptions(TypedDict, total=False):
    """Keyword arguments of `communication` and `step_time`: how a model is laid out over a world."""

    mesh: Mapping[str, int] | Any
    """Ranks by axis: ``dp``; ``replicate`` and ``shard`` for hybrid_shard; ``tp``; ``pp``; or a `DeviceMesh` that has
    such axes. None: all along ``dp``."""
    strategy: ShardingStrategy | str
    """``ddp``, or a `ShardingStrategy` or its value; full_shard unless said. With ``pp``, as `Parallel3D` has it."""
    inputs: Any
    """What a rank's batch looks like: a tensor, a tuple of the model's arguments, or a function that makes them. Needed
    with ``tp`` and ``pp``, and for times; without, gradients are taken to be ready in reverse."""
    target: Any
    """What the loss takes besides the output, in the same forms."""
    loss: Callable[..., torch.Tensor] | None
    """From output and target, or from the output alone, to a number; None: the sum of the output."""
    batch: int
    """Of a GPTConfig, and of inputs that are described: samples of a rank's batch; 1 unless said."""
    seq: int | None
    """The same: tokens of a sample."""
    mixed_precision: torch.dtype | str | None
    """As in `FSDP`: dtype of parameters while they are whole; gradients then travel in float32."""
    wrap: Wrap | str
    """As in `FSDP`: which modules are units; a class may be given by its name."""
    bucket_size_mb: float
    """As in `DDP`: 25 unless said."""
    broadcast_buffers: bool
    """As in `DDP`: True unless said."""
    tp_plan: Any
    """As `plan` of `parallelize`: ``auto`` unless said."""
    sequence: bool
    """As in `parallelize`."""
    parallel_loss: bool
    """The loss is `parallel_cross_entropy`."""
    schedule: PipelineSchedule | str
    """As in `Pipeline`: 1F1B unless said."""
    microbatches: int | None
    """As `num_microbatches` of `Pipeline`; None: as many as stages."""
    num_stages: int | None
    """As in `Pipeline.split`."""
    at: Sequence[str] | None
    """As in `Pipeline.split`: children that begin a stage."""
    device: str
    """What ranks compute on, ``cuda`` unless said, or ``cpu``: with ZeRO-1 on CPUs they wait for each other."""


@dataclass(frozen=True)
class Layout:
    """What is asked for, and what follows from it. Fields that are not explained are those of `LayoutOptions`."""

    given: Given
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
    microbatches: int | None = None
    num_stages: int | None = None
    at: Sequence[str] | None = None
    device: str = "cuda"
    optimizer: Callable[..., Optimizer] | None = None
    """Its step is counted, too."""
    recompute: bool = False
    """Each child of the model keeps its input alone for backward, and is computed again."""
    known: ModelTrace | None = None
    """The trace, where it has been made already."""
    trace: ModelTrace = field(init=False)
    """Of one step of the whole model on a rank's batch."""
    styles: Mapping[str, str] = field(init=False)
    """How modules are cut over ``tp``."""
    stages: Stages | None = field(init=False)
    """How the model is cut over ``pp``; None: it is not."""

    def __post_init__(self) -> None:
        trace = self.known or trace_model(self.given, optimizer=self.optimizer, dtype=self.mixed_precision)
        if self.size("tp", "pp") > 1 and not trace.called:
            raise UsageError(
                "tp and pp send activations, so a plan needs inputs=: what a rank's batch looks like, such as "
                "torch.zeros(8, 128, dtype=torch.int64)."
            )
        wrap = kinds_in(trace.model, self.wrap, "wrap")
        styles = _styles(trace, self) if self.size("tp") > 1 else {}
        stages = None
        if self.size("pp") > 1:
            stages = stages_for(
                trace,
                ranks=self.size("pp"),
                schedule=self.schedule,
                microbatches=self.microbatches,
                num_stages=self.num_stages,
                at=self.at,
            )
        for name, value in (("trace", trace), ("wrap", wrap), ("styles", styles), ("stages", stages)):
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls,
        model: Any,
        world: int | None,
        options: Mapping[str, Any],
        optimizer: Callable[..., Optimizer] | str | None = None,
        **own: Any,
    ) -> Layout:
        """The layout that a user asks for.

        Args:
            model: As in `communication`.
            world: Number of ranks; None: as the mesh has.
            options: Those of `LayoutOptions`.
            optimizer: Made from parameters, or the name of one of torch's; its step is counted.
            **own: Fields of `Layout` that users do not give.

        Raises:
            UsageError: an option is unknown or has no meaning, or the model cannot be laid out so.
        """
        unknown = options.keys() - LayoutOptions.__annotations__.keys()
        if unknown:
            names = ", ".join(LayoutOptions.__annotations__)
            raise UsageError(f"{min(unknown)}=: there is no such option; there are {names}.")
        rest = dict(options)
        subject = {name: rest.pop(name) for name in ("inputs", "target", "loss", "batch", "seq") if name in rest}
        strategy = rest.pop("strategy", "full_shard")
        strategy = str(strategy.value if isinstance(strategy, ShardingStrategy) else strategy).lower()
        mesh = resolved_mesh(world, rest.pop("mesh", None), strategy)
        rest["mixed_precision"] = dtype_of(rest.pop("mixed_precision", None))
        _check_options(options, mesh)
        return cls(Given(by_name(model), **subject), mesh, strategy, optimizer=optimizer_of(optimizer), **rest, **own)

    def size(self, *axes: str) -> int:
        """Ranks along these axes together; 1 for those that are not there."""
        return math.prod(self.mesh.get(axis, 1) for axis in axes)

    @cached_property
    def parameters(self) -> list[Held]:
        """Each parameter as one rank along ``tp`` has it."""
        return local_parameters(self.trace, self.styles, self.size("tp"))

    @cached_property
    def parameters_at(self) -> list[list[Held]]:
        """The same, by the rank along ``pp`` that has them."""
        if self.stages is None:
            return [self.parameters]
        found: list[list[Held]] = [[] for _ in range(self.size("pp"))]
        for held in self.parameters:
            found[self.stages.among[held.name.partition(".")[0]]].append(held)
        return found

    @cached_property
    def cut_children(self) -> frozenset[str]:
        """Children of the model that ``tp`` cuts."""
        return frozenset(name.partition(".")[0] for name in self.styles)

    @property
    def data_axis(self) -> str:
        """The axis over which gradients are averaged, of one axis alone."""
        return next((axis for axis in DATA_AXES if axis in self.mesh), "dp")

    @property
    def title(self) -> str:
        """Model and layout, in words."""
        shown = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        parts = [f"{type(self.trace.model).__name__} on {shown}"]
        if self.size(*DATA_AXES) > 1:
            parts.append(self.strategy)
        if self.stages is not None:
            parts.append(f"{self.stages.schedule.value} with {self.stages.microbatches} microbatches")
        if self.sequence and self.size("tp") > 1:
            parts.append("sequence parallel")
        return ", ".join(parts)


def _check_options(options: Mapping[str, Any], mesh: Mapping[str, int]) -> None:
    """See that those of `LayoutOptions` have a meaning that is not looked at elsewhere.

    Raises:
        PlanError: one has none.
    """
    for name in ("batch", "seq", "microbatches", "num_stages"):
        if (given := options.get(name)) is not None or (name == "batch" and name in options):
            whole_number(name, given)
            if name in ("microbatches", "num_stages") and mesh.get("pp", 1) == 1:
                raise PlanError(f"{name}={given} without pp: mesh={{'pp': 4, …}} makes a pipeline.")
    limit = options.get("bucket_size_mb", 25.0)
    real_number("bucket_size_mb", limit, rule="a number of MiB above 0", least=1e-9)
    one_of("device", options.get("device", "cuda"), ("cpu", "cuda"))
    check_callable("loss", options.get("loss"), "of the output, and of the target where there is one, to a number")


def optimizer_of(given: Callable[..., Optimizer] | str | None) -> Callable[..., Optimizer] | None:
    """What makes an optimizer, from what a user gives: that itself, or the name of one of torch's.

    Raises:
        UsageError: there is none of this name, or it is nothing that can be called.
    """
    if isinstance(given, Optimizer):
        raise UsageError(f"optimizer is a {type(given).__name__} that is made already: give its class, or its name.")
    if given is not None and not isinstance(given, str) and not callable(given):
        raise UsageError(f"optimizer={given!r}: a name in torch.optim such as 'AdamW', its class, or what makes one.")
    if not isinstance(given, str):
        return given
    kinds = {name.lower(): kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    if given.lower() not in kinds:
        raise UsageError(f"optimizer={given!r}: torch.optim has none of this name; or give what makes one.")
    kind: Callable[..., Optimizer] = kinds[given.lower()]
    return kind


def dtype_of(given: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype from itself or its name.

    Raises:
        UsageError: it is none of floating point numbers.
    """
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if given is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise UsageError(f"mixed_precision={given!r}: a dtype of floating point numbers, such as torch.bfloat16.")
    return found


def _styles(trace: ModelTrace, layout: Layout) -> dict[str, str]:
    model, ranks = trace.model, layout.size("tp")
    if layout.tp_plan == "auto":
        sequence, loss = layout.sequence, layout.parallel_loss
        styles: dict[str, str] = trace.once(
            ("styles", ranks, sequence, loss),
            lambda: automatic_plan(model, num_ranks=ranks, sequence=sequence, parallel_loss=loss)[0],
        )
        return styles
    if not isinstance(layout.tp_plan, Mapping):
        raise UsageError(f"tp_plan={layout.tp_plan!r}: 'auto', or patterns of module names to styles.")
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, str] = {}
    for pattern, style in layout.tp_plan.items():
        word = style if isinstance(style, str) else _TORCH_STYLES.get(type(style).__name__, "")
        if word not in STYLES:
            raise UsageError(f"tp_plan[{pattern!r}]: {style!r} is no style that can be planned: {', '.join(STYLES)}.")
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            raise UsageError(f"tp_plan[{pattern!r}]: no module of {type(model).__name__} has a name like that.")
        found |= dict.fromkeys(hits, word)
    for name, word in found.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        check_divisible(name, model.get_submodule(name), word, parent=parent, num_ranks=ranks)
    return found
