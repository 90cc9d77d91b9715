"""A memory planning request, and the checks that need no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from axon_nb.plan.arguments import UNSHARDED, check_callable, check_choice, check_int, check_number
from axon_nb.plan.errors import PlanError
from axon_nb.plan.models import check_model, dtype_name

OFFLOADED: dict[str, tuple[str, ...]] = {
    "none": (),
    "params": ("parameters",),
    "optimizer_states": ("optimizer",),
    "full": ("parameters", "gradients", "optimizer"),
}
"""The parts that each kind of offloading keeps in host memory."""
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class MemoryRequest:
    """One request to the simulator; fields as in `plan.memory`."""

    model: Any
    mesh: Mapping[str, int]
    """Size of each axis; the last one varies fastest."""
    strategy: str
    inputs: Any = None
    target: Any = None
    loss: Any = None
    optimizer: Any = "AdamW"
    """A name in `torch.optim`, a class, or a function that makes one from parameters."""
    optimizer_options: Mapping[str, Any] | None = None
    dtype: str | None = None
    mixed_precision: str | None = None
    cpu_offload: str = "none"
    batch: int = 1
    seq: int | None = None
    activation_checkpointing: Any = None
    wrap: Any = None
    tp_plan: Any = "auto"
    num_microbatches: int | None = None
    schedule: str = "1F1B"
    device: str = "cuda"
    ranks: str | tuple[int, ...] = "worst"
    fragmentation: float = 0.0
    extrapolate: bool = True
    simulate: bool = True

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh.values())

    @property
    def is_unwrapped(self) -> bool:
        """Whether nothing is wrapped around the model: layers are sharded, and tp is the only axis."""
        return self.mesh.keys() == {"tp"}

    def size(self, *axes: str) -> int:
        """Product of the sizes of these axes; a missing axis counts as 1."""
        return math.prod(self.mesh.get(axis, 1) for axis in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank, by axis."""
        place = {}
        for axis, size in reversed(list(self.mesh.items())):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in self.mesh}

    def check(self) -> MemoryRequest:
        """Check all that needs no torch, and return this request.

        Raises:
            PlanError: an option is invalid.
        """
        check_model(self.model)
        for name in ("dtype", "mixed_precision"):
            if (value := getattr(self, name)) is not None:
                dtype_name(value, name)
        check_choice("cpu_offload", self.cpu_offload, tuple(OFFLOADED))
        check_choice("device", self.device, _DEVICES)
        for name in ("batch", "seq", "num_microbatches"):
            if (value := getattr(self, name)) is not None or name == "batch":
                check_int(name, value)
        check_number("fragmentation", self.fragmentation, rule="a fraction of everything else, such as 0.05", most=1.0)
        check_callable("loss", self.loss, "of the output (and the target, if there is one) to a scalar")
        if self.optimizer_options is not None and not isinstance(self.optimizer_options, Mapping):
            raise PlanError(
                f"optimizer_options must be keyword arguments, such as {{'lr': 1e-3}}; got {self.optimizer_options!r}."
            )
        if self.tp_plan != "auto" and not isinstance(self.tp_plan, Mapping):
            raise PlanError(f"tp_plan must be 'auto', or map module name patterns to styles; got {self.tp_plan!r}.")
        numbers = () if isinstance(self.ranks, str) else self.ranks
        outside = [rank for rank in numbers if not 0 <= int(rank) < self.world_size]
        if outside:
            raise PlanError(f"ranks must be 0 to {self.world_size - 1}; got {outside[0]}.")
        self._check_combinations()
        return self

    def _check_combinations(self) -> None:
        """Check options against each other."""
        unsharded = self.strategy in UNSHARDED
        if unsharded and self.cpu_offload in ("params", "full"):
            raise PlanError(
                f"cpu_offload={self.cpu_offload!r} does not work with {self.strategy}, which keeps all parameters on "
                "each device: use full_shard."
            )
        if self.strategy == "ddp" and self.cpu_offload != "none":
            raise PlanError(
                f"cpu_offload={self.cpu_offload!r} does not work with ddp: use optimizer_state or full_shard."
            )
        if self.is_unwrapped and (self.mixed_precision is not None or self.cpu_offload != "none"):
            raise PlanError(
                "mixed_precision and cpu_offload require FSDP: add a dp axis, mesh={'dp': 1, 'tp': …}. To convert the "
                "model, use dtype=."
            )
        if self.size("pp") > 1:
            if self.strategy not in ("full_shard", "shard_grad_op") and self.size("dp") > 1:
                raise PlanError(f"strategy={self.strategy!r} does not work with pp: use full_shard or shard_grad_op.")
            if self.cpu_offload != "none":
                raise PlanError(f"cpu_offload={self.cpu_offload!r} does not work with pp: leave it out.")
        elif self.num_microbatches is not None:
            raise PlanError(
                f"num_microbatches={self.num_microbatches} requires a pipeline: add a pp axis, mesh={{'pp': 4, …}}."
            )


def parse_ranks(value: Any) -> str | tuple[int, ...]:
    """Parse which ranks to plan for: ``worst``, ``all``, or rank numbers.

    Raises:
        PlanError: it is none of these.
    """
    if isinstance(value, str):
        return check_choice("ranks", value, ("worst", "all"))
    numbers = list(value) if isinstance(value, Iterable) else [value]
    if not numbers:
        raise PlanError(f"ranks must be 'worst', 'all' or one or more rank numbers; got {value!r}.")
    return tuple(check_int("ranks", number, least=0) for number in numbers)
