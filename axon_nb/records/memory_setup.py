"""How a model is trained, as far as that decides over memory: what ranks do now, and what is asked instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from axon_nb.errors import UsageError

__all__ = ["WITH_MOMENTUM", "MemorySetup", "changed"]

_NUMBERS = {
    "world": "ranks",
    "shard": "ranks that share one copy",
    "batch": "samples on a rank",
    "pp": "ranks of a pipeline",
    "tp": "ranks that share a layer",
    "microbatches": "microbatches",
}
_MOST = 1_000_000
WITH_MOMENTUM = "sgd with momentum"
"""An optimizer of its own here, as it holds as many states as parameters, and plain SGD none."""


@dataclass(frozen=True, slots=True)
class MemorySetup:
    """What `axon_nb.plan.memory` is asked with."""

    world: int = 1
    """Number of ranks."""
    strategy: str = "ddp"
    """As `plan.memory` takes it."""
    shard: int = 1
    """With ``hybrid_shard``: ranks that share one copy."""
    dtype: str = ""
    """Of parameters; empty: as the model has them."""
    mixed_precision: str = ""
    """dtype of forward and backward; empty: that of the parameters."""
    optimizer: str = "adam"
    """Its name in `torch.optim`; `WITH_MOMENTUM`: SGD with momentum."""
    offload: str = "none"
    """What is kept in the host's memory."""
    batch: int = 1
    """Samples on a rank."""
    checkpointing: bool = False
    """Whether equal blocks are computed again in backward."""
    pp: int = 1
    """Ranks of a pipeline: those of one copy of the model, one after the other."""
    tp: int = 1
    """Ranks that share each layer."""
    microbatches: int = 1
    """Parts of a rank's batch, in a pipeline."""

    @property
    def optimizer_arguments(self) -> tuple[str, dict[str, Any]]:
        """The name in `torch.optim`, and options that belong to it."""
        return ("sgd", {"momentum": 0.9}) if self.optimizer == WITH_MOMENTUM else (self.optimizer, {})

    @property
    def mesh(self) -> dict[str, int]:
        """Size of each axis.

        Raises:
            UsageError: the ranks cannot be arranged so.
        """
        within = self.pp * self.tp
        if within > 1:
            return self._axes(within)
        if self.strategy != "hybrid_shard":
            return {"dp": self.world}
        if self.world % self.shard:
            raise UsageError(
                f"hybrid_shard with {self.shard} of {self.world} ranks to a copy: it must divide them, such as "
                f"{next(size for size in range(self.shard, self.world + 1) if self.world % size == 0)}."
                if self.shard < self.world
                else f"hybrid_shard with {self.shard} of {self.world} ranks to a copy: there are no more than all."
            )
        return {"replicate": self.world // self.shard, "shard": self.shard}

    def _axes(self, within: int) -> dict[str, int]:
        if self.strategy == "hybrid_shard":
            raise UsageError("hybrid_shard in a pipeline, or with layers cut over ranks: take full_shard.")
        if self.world % within:
            raise UsageError(
                f"{self.world} ranks, {self.pp} of a pipeline x {self.tp} to a layer: they are a multiple of {within}."
            )
        axes = {"pp": self.pp, "dp": self.world // within, "tp": self.tp}
        return {axis: size for axis, size in axes.items() if size > 1 or axis == "dp"}


def changed(setup: MemorySetup, given: Mapping[str, Any]) -> MemorySetup:
    """A setup with some fields as a page gives them.

    Raises:
        UsageError: a number is none, or is not above 0; there is no such field.
    """
    values: dict[str, Any] = {}
    known = {item.name for item in fields(MemorySetup)}
    for name, value in given.items():
        if name not in known:
            raise UsageError(f"{name!r}: a setup has {', '.join(sorted(known))}.")
        values[name] = _number(name, value) if name in _NUMBERS else value
    if not isinstance(values.get("checkpointing", False), bool):
        raise UsageError(f"checkpointing={values['checkpointing']!r}: it is True or False.")
    return replace(setup, **values)


def _number(name: str, value: Any) -> int:
    try:
        number = int(str(value).strip())
    except ValueError:
        number = 0
    if not 1 <= number <= _MOST:
        raise UsageError(f"{_NUMBERS[name]}: {value!r} is no whole number from 1 to {_MOST:,}.")
    return number
