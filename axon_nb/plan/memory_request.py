"""What a plan of memory is asked for, checked as far as that needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from axon_nb.plan.errors import PlanError
from axon_nb.plan.models import check_model, dtype_name

__all__ = ["OFFLOADED", "STRATEGIES", "MemoryRequest", "resolved_mesh", "some_ranks"]

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "optimizer_state", "ddp")
"""Those of `ShardingStrategy`, and torch's DistributedDataParallel."""
OFFLOADED: dict[str, tuple[str, ...]] = {
    "none": (),
    "params": ("parameters",),
    "optimizer_states": ("optimizer",),
    "full": ("parameters", "gradients", "optimizer"),
}
"""What each kind of offloading keeps in the host's memory."""
_AXES = ("pp", "replicate", "dp", "shard", "tp")
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
        _choice("offload", self.offload, tuple(OFFLOADED))
        _choice("device", self.device, _DEVICES)
        for name in ("batch", "seq", "microbatches"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise PlanError(f"{name}={given}: it is 1 or more.")
        if not 0 <= self.fragmentation < 1:
            raise PlanError(f"fragmentation={self.fragmentation}: a share of the peak, such as 0.05.")
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


def resolved_mesh(world: int | None, mesh: Mapping[str, int] | None, strategy: str) -> dict[str, int]:
    """The axes of a plan, and their sizes.

    Args:
        world: Number of ranks; None: as the mesh has.
        mesh: Size of each axis; None: one of the strategy, over all ranks.
        strategy: What is sharded.

    Raises:
        PlanError: the sizes do not fit together, or an axis is unknown or missing.
    """
    _choice("strategy", strategy, STRATEGIES)
    if world is not None and world < 1:
        raise PlanError(f"world={world}: there is at least 1 rank.")
    if mesh is None:
        if world is None:
            raise PlanError("how many ranks? memory(…, world=8), or mesh={'dp': 4, 'tp': 2}.")
        if strategy == "hybrid_shard":
            raise PlanError("hybrid_shard needs to know a node's ranks: mesh={'replicate': 2, 'shard': 8}.")
        return {"dp": world}
    for axis, size in mesh.items():
        if axis not in _AXES:
            raise PlanError(f"axis {axis!r}: a mesh has {', '.join(_AXES)}.")
        if size < 1:
            raise PlanError(f"{axis}={size}: an axis has at least 1 rank.")
    product = math.prod(mesh.values())
    if world not in (None, product):
        shown = " x ".join(f"{axis}={size}" for axis, size in mesh.items())
        raise PlanError(f"{shown} makes {product} ranks, and world={world}: leave one of the two away.")
    hybrid = {"replicate", "shard"}
    if strategy == "hybrid_shard" and not hybrid <= mesh.keys():
        raise PlanError(f"hybrid_shard on {dict(mesh)}: it takes both axes, {{'replicate': 2, 'shard': 8}}.")
    if strategy != "hybrid_shard" and hybrid & mesh.keys():
        raise PlanError(f"{strategy} on {dict(mesh)}: its axis is dp; replicate and shard are those of hybrid_shard.")
    if "pp" in mesh and strategy == "hybrid_shard":
        raise PlanError("hybrid_shard with pp: a pipeline's stages are sharded over one axis, dp.")
    return dict(sorted(mesh.items(), key=lambda item: _AXES.index(item[0])))


def some_ranks(given: str | int | Sequence[int]) -> str | tuple[int, ...]:
    """Which ranks are asked for: ``worst``, ``all``, or their numbers.

    Raises:
        PlanError: none of these.
    """
    if isinstance(given, str):
        return _choice("ranks", given, ("worst", "all"))
    return (given,) if isinstance(given, int) else tuple(given)


def _choice(name: str, given: Any, choices: Sequence[str]) -> str:
    if given not in choices:
        raise PlanError(f"{name}={given!r}: it is one of {', '.join(choices)}.")
    return str(given)
