"""What a plan of memory is asked for, checked as far as that needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from axon_nb.plan.asked_numbers import check_callable, real_number, whole_number
from axon_nb.plan.errors import PlanError
from axon_nb.plan.mesh_axes import one_of
from axon_nb.plan.models import check_model, dtype_name

__all__ = ["OFFLOADED", "MemoryRequest", "some_ranks"]

OFFLOADED: dict[str, tuple[str, ...]] = {
    "none": (),
    "params": ("parameters",),
    "optimizer_states": ("optimizer",),
    "full": ("parameters", "gradients", "optimizer"),
}
"""What each kind of offloading keeps in the host's memory."""
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class MemoryRequest:
    """One question to the simulator."""

    model: Any
    mesh: Mapping[str, int]
    """Size of each axis, the last one varying fastest."""
    strategy: str
    inputs: Any = None
    target: Any = None
    loss: Any = None
    optimizer: Any = "adam"
    """A name in `torch.optim`, or what makes one from parameters."""
    optimizer_options: Mapping[str, Any] | None = None
    dtype: str | None = None
    mixed_precision: str | None = None
    offload: str = "none"
    batch: int = 1
    seq: int | None = None
    checkpointing: Any = None
    wrap: Any = None
    tp_plan: Any = "auto"
    microbatches: int | None = None
    schedule: str = "1F1B"
    device: str = "cuda"
    ranks: str | tuple[int, ...] = "worst"
    fragmentation: float = 0.0
    extrapolate: bool = True
    simulate: bool = True

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh.values())

    @property
    def is_bare(self) -> bool:
        """Whether layers are cut and nothing is wrapped around them: there is no axis but tp."""
        return self.mesh.keys() == {"tp"}

    def size(self, *axes: str) -> int:
        """Ranks along these axes together; 1 for those that are not there."""
        return math.prod(self.mesh.get(axis, 1) for axis in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is, by axis."""
        place = {}
        for axis, size in reversed(list(self.mesh.items())):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in self.mesh}

    def check(self) -> MemoryRequest:
        """This request, when all that can be seen without torch is right.

        Raises:
            PlanError: something is not.
        """
        check_model(self.model)
        for name in ("dtype", "mixed_precision"):
            if (given := getattr(self, name)) is not None:
                dtype_name(given, name)
        one_of("offload", self.offload, tuple(OFFLOADED))
        one_of("device", self.device, _DEVICES)
        for name in ("batch", "seq", "microbatches"):
            if (given := getattr(self, name)) is not None or name == "batch":
                whole_number(name, given)
        real_number("fragmentation", self.fragmentation, rule="a share of all else, such as 0.05", most=1.0)
        check_callable("loss", self.loss, "of the output, and of the target where there is one, to a scalar")
        if self.optimizer_options is not None and not isinstance(self.optimizer_options, Mapping):
            raise PlanError(f"optimizer_options={self.optimizer_options!r}: keyword arguments, such as {{'lr': 1e-3}}.")
        if self.tp_plan != "auto" and not isinstance(self.tp_plan, Mapping):
            raise PlanError(f"tp_plan={self.tp_plan!r}: 'auto', or patterns of module names to styles.")
        outside = [rank for rank in self.ranks if not 0 <= int(rank) < self.world] if self._some() else []
        if outside:
            raise PlanError(f"rank {outside[0]}: there are {self.world} ranks, 0 to {self.world - 1}.")
        self._check_whole()
        return self

    def _some(self) -> bool:
        return not isinstance(self.ranks, str)

    def _check_whole(self) -> None:
        """What does not go together."""
        whole = self.strategy in ("ddp", "optimizer_state")
        if whole and self.offload in ("params", "full"):
            raise PlanError(
                f"offload={self.offload!r} with {self.strategy}: its parameters are whole on every device; full_shard "
                "can keep them on the host."
            )
        if self.strategy == "ddp" and self.offload != "none":
            raise PlanError(f"offload={self.offload!r} with ddp: optimizer_state and full_shard can offload.")
        if self.is_bare and (self.mixed_precision is not None or self.offload != "none"):
            raise PlanError(
                "mixed_precision and offload with an axis tp alone: they come with FSDP, mesh={'dp': 1, 'tp': …}; "
                "dtype= converts the model."
            )
        if self.size("pp") > 1:
            if self.strategy not in ("full_shard", "shard_grad_op") and self.size("dp") > 1:
                raise PlanError(
                    f"strategy={self.strategy!r} with pp: stages are sharded by full_shard or shard_grad_op."
                )
            if self.offload != "none":
                raise PlanError(f"offload={self.offload!r} with pp: pipelines keep all on the device; leave it away.")
        elif self.microbatches is not None:
            raise PlanError(f"microbatches={self.microbatches} without pp: mesh={{'pp': 4, …}} makes a pipeline.")


def some_ranks(given: Any) -> str | tuple[int, ...]:
    """Which ranks are asked for: ``worst``, ``all``, or their numbers.

    Raises:
        PlanError: none of these.
    """
    if isinstance(given, str):
        return one_of("ranks", given, ("worst", "all"))
    numbers = list(given) if isinstance(given, Iterable) else [given]
    if not numbers:
        raise PlanError(f"ranks={given!r}: it is worst, all, or the numbers of one rank or more.")
    return tuple(whole_number("ranks", number, least=0) for number in numbers)
