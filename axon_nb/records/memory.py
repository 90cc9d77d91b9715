"""Records about memory: the use of a rank by role, training setups, and what-if questions with their predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from axon_nb.errors import UsageError

ROLES = (
    "parameters",
    "gradients",
    "optimizer",
    "buffers",
    "activations",
    "unsharded",
    "communication",
    "fragmentation",
    "copies",
    "other",
)
"""Uses of memory, in drawing order. Only plans know `unsharded` (full FSDP parameters), `communication` (buffers of
collectives) and `fragmentation`; `copies` are those of undo and protection."""
_NUMBERS = {
    "world_size": "ranks",
    "shard": "ranks per replica",
    "batch": "samples per rank",
    "pp": "pipeline-parallel ranks",
    "tp": "tensor-parallel ranks",
    "num_microbatches": "microbatches",
    "ep": "ranks that share the experts",
    "cp": "ranks that share a sequence",
}
_MAX = 1_000_000
WITH_MOMENTUM = "sgd with momentum"
"""Separate from plain SGD, which has no state: it keeps one state per parameter."""


class MemoryUse(Struct, frozen=True):
    """Memory of one rank at one moment, in bytes."""

    rank: int
    """Rank in the default group."""
    time_ns: int
    """Time of the sample, in nanoseconds of `time.monotonic_ns`."""
    source: str
    """``storages`` (live tensors by role), ``allocator`` (CUDA), ``estimate`` (formula) or ``plan`` (simulation)."""
    by_role: Mapping[str, int] = field(default_factory=dict)
    """Bytes by role (see `ROLES`); unknown roles are omitted."""
    peak: int | None = None
    """Highest total since the last reset; None if unknown."""
    resident: int = 0
    """Resident memory of the process, drawn separately: includes the interpreter and libraries."""
    capacity: int | None = None
    """Memory of the device; for a CPU rank `resident` plus free memory. None if unknown."""
    resident_peak: int = 0
    """Peak resident memory of the process; 0 if unknown."""
    occupied: int | None = None
    """Used part of `capacity`, including other processes; None if unknown."""

    @property
    def total(self) -> int:
        """Sum over all roles."""
        return sum(self.by_role.values())


class MemoryShortage(Struct, frozen=True):
    """What the memory of a rank held when an allocation failed."""

    use: MemoryUse
    states: int = 0
    """Bytes of parameters, gradients and optimizer states on each rank; 0 if some of them are sharded already."""
    sharded: int = 0
    """The same with FSDP over all ranks, by the formulas of `axon_nb.plan`."""
    world_size: int = 1


class MemorySetup(Struct, frozen=True):
    """Arguments for `axon_nb.plan.memory`."""

    world_size: int = 1
    """Number of ranks."""
    strategy: str = "ddp"
    """Sharding strategy, as for `plan.memory`."""
    shard: int = 1
    """With ``hybrid_shard``: ranks per replica."""
    dtype: str = ""
    """dtype of parameters; empty for the model's own."""
    mixed_precision: str = ""
    """dtype of forward and backward; empty for that of the parameters."""
    optimizer: str = "adam"
    """Name in `torch.optim`, or `WITH_MOMENTUM` for SGD with momentum."""
    cpu_offload: str = "none"
    """What is offloaded to host memory."""
    batch: int = 1
    """Samples per rank."""
    activation_checkpointing: bool = False
    """Whether repeated blocks use activation checkpointing."""
    pp: int = 1
    """Pipeline-parallel size."""
    tp: int = 1
    """Tensor-parallel size."""
    num_microbatches: int = 1
    """Microbatches per batch of a rank, in a pipeline."""
    ep: int = 1
    """Ranks that share one copy of the experts."""
    cp: int = 1
    """Ranks that share a sequence."""

    @property
    def optimizer_arguments(self) -> tuple[str, dict[str, Any]]:
        """The optimizer's name in `torch.optim` and its options."""
        return ("sgd", {"momentum": 0.9}) if self.optimizer == WITH_MOMENTUM else (self.optimizer, {})

    def plan_options(self, trained: MemorySetup, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return what it says to `axon_nb.plan.memory`.

        Args:
            trained: How the model is trained.
            known: The options of the optimizer with which it is.
        """
        optimizer, options = self.optimizer_arguments
        return {
            "mesh": self.mesh,
            "strategy": self.strategy,
            "optimizer": optimizer,
            "optimizer_options": dict(known) if self.optimizer == trained.optimizer else options,
            "dtype": self.dtype or None,
            "mixed_precision": self.mixed_precision or None,
            "cpu_offload": self.cpu_offload,
            "batch": self.batch,
        }

    @property
    def mesh(self) -> dict[str, int]:
        """Size of each mesh axis.

        Raises:
            UsageError: the sizes do not fit the number of ranks.
        """
        within = {axis: size for axis in ("pp", "ep", "cp", "tp") if (size := getattr(self, axis)) > 1}
        if within:
            return self._axes(within)
        if self.strategy != "hybrid_shard":
            return {"dp": self.world_size}
        size = self.world_size
        if size % self.shard:
            raise UsageError(
                f"hybrid_shard: {self.shard} ranks per replica do not divide {size} ranks; use "
                f"{next(other for other in range(self.shard, size + 1) if size % other == 0)}, for example."
                if self.shard < size
                else f"hybrid_shard: {self.shard} ranks per replica exceed the {size} available."
            )
        return {"replicate": self.world_size // self.shard, "shard": self.shard}

    def _axes(self, within: dict[str, int]) -> dict[str, int]:
        if self.strategy == "hybrid_shard":
            raise UsageError(f"hybrid_shard cannot be combined with {' or '.join(within)}: use full_shard.")
        size = math.prod(within.values())
        if self.world_size % size:
            named = " and ".join(f"{axis}={ranks}" for axis, ranks in within.items())
            raise UsageError(f"{self.world_size} ranks with {named}: the number must be a multiple of {size}.")
        return {"dp": self.world_size // size, **within}


def changed(setup: MemorySetup, updates: Mapping[str, Any]) -> MemorySetup:
    """Return a copy of `setup` with some fields replaced by a page's input.

    Raises:
        UsageError: a number is invalid or not positive, or a field is unknown.
    """
    values: dict[str, Any] = {}
    known = set(MemorySetup.__struct_fields__)
    for name, value in updates.items():
        if name not in known:
            raise UsageError(f"{name!r} is unknown; fields are {', '.join(sorted(known))}.")
        values[name] = _number(name, value) if name in _NUMBERS else value
    if not isinstance(checkpointing := values.get("activation_checkpointing", False), bool):
        raise UsageError(f"activation_checkpointing={checkpointing!r}: must be True or False.")
    return replace(setup, **values)


def _number(name: str, value: Any) -> int:
    try:
        number = int(str(value).strip())
    except ValueError:
        number = 0
    if not 1 <= number <= _MAX:
        raise UsageError(f"{_NUMBERS[name]}: {value!r}: must be an integer from 1 to {_MAX:,}.")
    return number


class MemoryPrediction(Struct, frozen=True):
    """Predicted memory of ranks in bytes."""

    setup: MemorySetup
    method: str
    """How it was obtained, such as ``simulated`` or ``model states only``."""
    worst: int
    """Rank with the highest peak."""
    persistent: Mapping[int, Mapping[str, int]]
    """By rank and role: memory after an optimizer step, before gradients are freed."""
    peak: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """By rank and role: memory at the peak of a step; empty if only model states are known."""
    when: str = ""
    """Phase and module of the worst rank's peak."""
    host: int = 0
    """Host memory that the worst rank uses."""
    notes: tuple[str, ...] = ()
    """Assumptions behind the numbers."""

    @property
    def is_whole(self) -> bool:
        """Whether activations and buffers are included."""
        return bool(self.peak)


class WhatIfState(Struct, frozen=True):
    """Snapshot of a what-if question."""

    as_is: MemorySetup | None = None
    """The current training setup; None while unknown."""
    is_trained_so: bool = False
    """Whether `as_is` is known to be in use; False if it is only assumed."""
    setup: MemorySetup | None = None
    """The setup of the last question."""
    estimate: MemoryPrediction | None = None
    """The prediction for it, possibly partial."""
    reference: MemoryPrediction | None = None
    """The prediction for `as_is`, for comparison."""
    doing: str = ""
    """Current activity, such as ``simulating: a step of rank 0``; empty when idle."""
    share: float | None = None
    """Fraction of it that is done, 0 to 1."""
    error: str = ""
    """Why there is no prediction, as a sentence."""
    notes: tuple[str, ...] = ()
    """What is unknown about the model."""
    axes: tuple[str, ...] = ()
    """Which of ``ep`` and ``cp`` the model can be asked about."""


class LazyFunction(Struct, frozen=True):
    """A function whose module is imported on the first call."""

    module: str
    name: str

    def __call__(self, *args: Any) -> Any:
        """Import the module and call the function."""
        return getattr(import_module(self.module), self.name)(*args)


class HasClassName(Struct, frozen=True):
    """Predicate: whether an object's class has one of these names."""

    names: tuple[str, ...]

    def __call__(self, item: Any) -> bool:
        """Check the object's own class; base classes do not count."""
        return type(item).__name__ in self.names
