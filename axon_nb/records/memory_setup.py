"""Training setup as far as it determines memory: the current one, and what-if variations of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from axon_nb.errors import UsageError

__all__ = ["WITH_MOMENTUM", "MemorySetup", "changed"]

_NUMBERS = {
    "world": "ranks",
    "shard": "ranks per replica",
    "batch": "samples per rank",
    "pp": "pipeline-parallel ranks",
    "tp": "tensor-parallel ranks",
    "microbatches": "microbatches",
}
_MAX = 1_000_000
WITH_MOMENTUM = "sgd with momentum"
"""Separate from plain SGD, which has no state: it keeps one state per parameter."""


@dataclass(frozen=True, slots=True)
class MemorySetup:
    """Arguments for `axon_nb.plan.memory`."""

    world: int = 1
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
    offload: str = "none"
    """What is offloaded to host memory."""
    batch: int = 1
    """Samples per rank."""
    checkpointing: bool = False
    """Whether repeated blocks use activation checkpointing."""
    pp: int = 1
    """Pipeline-parallel size."""
    tp: int = 1
    """Tensor-parallel size."""
    microbatches: int = 1
    """Microbatches per batch of a rank, in a pipeline."""

    @property
    def optimizer_arguments(self) -> tuple[str, dict[str, Any]]:
        """The optimizer's name in `torch.optim` and its options."""
        return ("sgd", {"momentum": 0.9}) if self.optimizer == WITH_MOMENTUM else (self.optimizer, {})

    @property
    def mesh(self) -> dict[str, int]:
        """Size of each mesh axis.

        Raises:
            UsageError: the sizes do not fit the number of ranks.
        """
        within = self.pp * self.tp
        if within > 1:
            return self._axes(within)
        if self.strategy != "hybrid_shard":
            return {"dp": self.world}
        if self.world % self.shard:
            raise UsageError(
                f"hybrid_shard: {self.shard} ranks per replica do not divide {self.world} ranks; use "
                f"{next(size for size in range(self.shard, self.world + 1) if self.world % size == 0)}, for example."
                if self.shard < self.world
                else f"hybrid_shard: {self.shard} ranks per replica exceed the {self.world} available."
            )
        return {"replicate": self.world // self.shard, "shard": self.shard}

    def _axes(self, within: int) -> dict[str, int]:
        if self.strategy == "hybrid_shard":
            raise UsageError("hybrid_shard cannot be combined with pp or tp: use full_shard.")
        if self.world % within:
            raise UsageError(
                f"{self.world} ranks with pp={self.pp} and tp={self.tp}: the number must be a multiple of {within}."
            )
        axes = {"pp": self.pp, "dp": self.world // within, "tp": self.tp}
        return {axis: size for axis, size in axes.items() if size > 1 or axis == "dp"}


def changed(setup: MemorySetup, given: Mapping[str, Any]) -> MemorySetup:
    """Return a copy of `setup` with some fields replaced by a page's input.

    Raises:
        UsageError: a number is invalid or not positive, or a field is unknown.
    """
    values: dict[str, Any] = {}
    known = {item.name for item in fields(MemorySetup)}
    for name, value in given.items():
        if name not in known:
            raise UsageError(f"{name!r} is unknown; fields are {', '.join(sorted(known))}.")
        values[name] = _number(name, value) if name in _NUMBERS else value
    if not isinstance(values.get("checkpointing", False), bool):
        raise UsageError(f"checkpointing={values['checkpointing']!r}: must be True or False.")
    return replace(setup, **values)


def _number(name: str, value: Any) -> int:
    try:
        number = int(str(value).strip())
    except ValueError:
        number = 0
    if not 1 <= number <= _MAX:
        raise UsageError(f"{_NUMBERS[name]}: {value!r}: must be an integer from 1 to {_MAX:,}.")
    return number
