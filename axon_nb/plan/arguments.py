"""Arguments that all planners share, checked before anything is computed: the layout over ranks, and the mesh."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypedDict

from axon_nb.plan.errors import PlanError

if TYPE_CHECKING:
    import torch

    from axon_nb.parallel.data.units import Wrap
    from axon_nb.parallel.memory import ShardingStrategy
    from axon_nb.parallel.pipeline.schedule import PipelineSchedule

AXES = ("pp", "replicate", "dp", "shard", "ep", "cp", "tp")
"""In this order; the last one varies fastest."""
ZERO_2 = (
    "shard_grad_op is torch's ZeRO-2: parameters are sharded between steps, while the ZeRO paper's stage 2 keeps them "
    "whole"
)
"""Which of its two meanings "ZeRO-2" has here, as a note of plans."""

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "optimizer_state", "ddp")
"""Values of `ShardingStrategy`, and ``ddp`` for torch's DistributedDataParallel."""
SINGLE_AXIS_STRATEGIES = tuple(name for name in STRATEGIES if name != "hybrid_shard")
"""Strategies whose only data axis is dp."""
UNSHARDED = ("ddp", "optimizer_state")
"""Strategies that keep all parameters on each rank."""
STAGE_UNITS = "FSDP units: the modules of each pipeline stage."
"""What is gathered together in a pipeline, as a note of plans."""
_HYBRID_AXES = {"replicate", "shard"}


def check_int(name: str, value: Any, *, least: int = 1, what: str = "") -> int:
    """Check that an argument is a whole number; NumPy's integers count.

    Args:
        name: The argument's name.
        value: Its value.
        least: The smallest value allowed.
        what: What it counts, such as ``ranks``.

    Raises:
        PlanError: it is not a whole number, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        counted = f" of {what}" if what else ""
        raise PlanError(f"{name} must be a whole number{counted}, {least} or more; got {value!r}.")
    return int(value)


def check_number(name: str, value: Any, *, rule: str, least: float = 0.0, most: float = float("inf")) -> float:
    """Check that an argument is a number within limits.

    Args:
        name: The argument's name.
        value: Its value.
        rule: What it must be, such as ``a fraction from 0 to 1``.
        least: The smallest value allowed.
        most: The largest value allowed.

    Raises:
        PlanError: it is not a number, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) <= most:
        raise PlanError(f"{name} must be {rule}; got {value!r}.")
    return float(value)


def check_callable(name: str, value: Any, what: str) -> None:
    """Check that an argument is callable or None.

    Args:
        name: The argument's name.
        value: Its value.
        what: What the function takes and returns.

    Raises:
        PlanError: it is something else.
    """
    if value is not None and not callable(value):
        raise PlanError(f"{name} must be a function {what}, or None; got {value!r}.")


def check_callbacks(progress: Any, cancel: Any) -> None:
    """Check the progress callback and the cancel event of a simulation.

    Raises:
        PlanError: `progress` is not callable, or `cancel` has no `is_set`.
    """
    check_callable("progress", progress, "of the fraction done and the next step")
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise PlanError(f"cancel must be a threading.Event (set it to cancel the plan), or None; got {cancel!r}.")


class LayoutOptions(TypedDict, total=False):
    """Keyword arguments of `memory`, `communication` and `step_time`: how a model is laid out over ranks."""

    mesh: Mapping[str, int] | Any
    """Size of each axis: ``dp``; ``replicate`` and ``shard`` for hybrid_shard; ``tp`` shards layers; ``pp`` splits the
    model into stages; ranks along ``ep`` hold other experts and have other samples, and ranks along ``cp`` hold other
    positions of the same samples. A `DeviceMesh` with these axes works too. None: all ranks along ``dp``."""
    strategy: ShardingStrategy | str
    """A `ShardingStrategy`, its value, or ``ddp``; default full_shard. With ``pp``, as in `Parallel3D`."""
    inputs: Any
    """The model's inputs for one rank's batch: a `TensorSpec`, a tensor, a tuple of them, or a function that makes
    them. Not needed for a GPTConfig or a `GPT`."""
    target: Any
    """What the loss takes besides the output, in the same forms."""
    loss: Callable[..., torch.Tensor] | None
    """Function of output and target, or of the output alone, to a scalar. None: the mean (`memory`) or the sum of the
    output."""
    batch: int
    """Samples in one rank's batch; default 1."""
    seq: int | None
    """Tokens in a sample; None: the context of a GPTConfig."""
    mixed_precision: torch.dtype | str | None
    """dtype of parameters in forward and backward, as in `FSDP`; with ddp and optimizer_state, of autocast."""
    wrap: Wrap | str
    """Which modules are FSDP units, as in `FSDP`; a class may be given by name."""
    tp_plan: Any
    """As `plan` of `parallelize`; default ``auto``."""
    schedule: PipelineSchedule | str
    """Pipeline schedule, as in `Pipeline`; default 1F1B."""
    num_microbatches: int | None
    """As in `Pipeline`; None: one per stage."""
    device: str
    """``cuda`` (default) or ``cpu``."""


def check_options(options: Mapping[str, Any], allowed: Sequence[str], *, named: Sequence[str] = ()) -> None:
    """Check the names of keyword arguments.

    Args:
        options: The keyword arguments.
        allowed: Names that they may have.
        named: Other arguments of the function, to suggest.

    Raises:
        PlanError: one is unknown.
    """
    for name in sorted(options.keys() - set(allowed)):
        close = difflib.get_close_matches(name, [*allowed, *named], n=1)
        hint = f"did you mean {close[0]}=?" if close else f"options are {', '.join(allowed)}."
        raise PlanError(f"{name}= is not an option; {hint}")


def choice_value(value: Any) -> str:
    """Return the value of an enumeration member, or a plain string."""
    return str(getattr(value, "value", value))


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Check that an argument is one of some strings.

    Raises:
        PlanError: it is not.
    """
    if value not in choices:
        raise PlanError(f"{name} must be one of {', '.join(choices)}; got {value!r}.")
    return str(value)


def resolve_mesh(world_size: Any, mesh: Any, strategy: str) -> dict[str, int]:
    """Return the size of each mesh axis.

    Args:
        world_size: Number of ranks; None: the mesh says.
        mesh: Size of each axis, or a `DeviceMesh` with named axes; None: one axis dp with all ranks.
        strategy: One of `STRATEGIES`.

    Raises:
        PlanError: the sizes do not match, or an axis is unknown or missing.
    """
    check_choice("strategy", strategy, STRATEGIES)
    if world_size is not None:
        world_size = check_int("world_size", world_size, what="ranks")
    if mesh is None or (isinstance(mesh, Mapping) and not mesh):
        if world_size is None:
            raise PlanError("The number of ranks is missing: give world_size=8, or mesh={'dp': 4, 'tp': 2}.")
        if strategy == "hybrid_shard":
            raise PlanError("hybrid_shard needs both of its axes: mesh={'replicate': 2, 'shard': 8}.")
        return {"dp": world_size}
    axes = {axis: check_int(str(axis), size, what="ranks") for axis, size in _sizes(mesh).items()}
    product = math.prod(axes.values())
    if world_size not in (None, product):
        shown = " x ".join(f"{axis}={size}" for axis, size in axes.items())
        raise PlanError(f"{shown} is {product} ranks, but world_size={world_size}: leave one of the two out.")
    _check_strategy(axes, strategy)
    return dict(sorted(axes.items(), key=lambda item: AXES.index(item[0])))


def _sizes(mesh: Any) -> Mapping[str, Any]:
    names = getattr(mesh, "mesh_dim_names", None)
    sizes = dict(zip(names, mesh.shape, strict=True)) if names else mesh
    if not isinstance(sizes, Mapping):
        raise PlanError(f"mesh must give the number of ranks per axis, such as {{'dp': 4, 'tp': 2}}; got {mesh!r}.")
    for axis in sizes:
        if axis not in AXES:
            raise PlanError(f"{axis!r} is not a mesh axis; axes are {', '.join(AXES)}.")
    return sizes


def _check_strategy(axes: Mapping[str, int], strategy: str) -> None:
    if strategy != "hybrid_shard":
        if _HYBRID_AXES & axes.keys():
            raise PlanError(f"{strategy} on {axes}: use the axis dp; replicate and shard belong to hybrid_shard.")
    elif not axes.keys() >= _HYBRID_AXES or "dp" in axes:
        raise PlanError(f"hybrid_shard on {axes}: use the axes replicate and shard, {{'replicate': 2, 'shard': 8}}.")
    elif within := next((axis for axis in ("pp", "ep", "cp") if axis in axes), ""):
        raise PlanError(f"hybrid_shard does not work with {within}: use full_shard, which shards over one axis, dp.")
