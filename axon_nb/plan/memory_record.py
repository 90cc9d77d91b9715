"""What a plan of memory says: bytes of each rank, by what they are for, between steps and at the peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from axon_nb.plan.asked_numbers import real_number
from axon_nb.plan.errors import PlanError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["GIB", "MODEL_STATES_ONLY", "PARTS", "MemoryParts", "MemoryPlan", "ModuleMemory", "RankMemory"]

GIB = 1024**3
MODEL_STATES_ONLY = "model states only"
"""The method of a plan by formula: it has no activations and no buffers."""


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes on one rank at one moment."""

    parameters: int = 0
    """What the rank holds of them between steps."""
    gradients: int = 0
    optimizer: int = 0
    """The optimizer's states, as large as parameters."""
    activations: int = 0
    """Inputs, what forward keeps for backward, the gradients of these, and what an operation needs for a moment."""
    unsharded: int = 0
    """Whole parameters of FSDP, while a unit computes, and their gradients until they are reduced."""
    communication: int = 0
    """Buffers of collectives: of all-gather and reduce-scatter, DDP's buckets, what stages receive."""
    other: int = 0
    """The model's buffers, counts of steps, and what the optimizer's step needs for a moment."""
    fragmentation: int = 0
    """An allowance for what an allocator cannot use: no prediction."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, part) for part in PARTS)

    @property
    def model_states(self) -> int:
        """Parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    def with_allowance(self, share: float) -> MemoryParts:
        """The same with an allowance for fragmentation, a share of all else."""
        bare = replace(self, fragmentation=0)
        return replace(bare, fragmentation=round(share * bare.total))

    def as_dict(self) -> dict[str, int]:
        """Bytes by part."""
        return {part: getattr(self, part) for part in PARTS}


PARTS = tuple(item.name for item in fields(MemoryParts))
"""The parts, in order."""


@dataclass(frozen=True, slots=True)
class ModuleMemory:
    """Bytes on one rank that belong to one module, those within it not counted."""

    name: str
    """In the model as it was given; empty: the model itself."""
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """What its forward has made and is held at the rank's peak."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank."""

    rank: int
    coordinates: Mapping[str, int]
    """Where it is, by axis of the mesh."""
    persistent: MemoryParts
    """After the optimizer's step, gradients still there."""
    peak: MemoryParts
    """At the step's highest moment; in plans by formula the same."""
    phase: str = ""
    """When that is: forward, backward or optimizer; empty in plans by formula."""
    module: str = ""
    """The module that computes then, as far as it is known."""
    host_bytes: int = 0
    """What offloading keeps in the host's memory; on CPU ranks it is in the parts as well."""
    modules: tuple[ModuleMemory, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a training step takes of each rank's memory; all sizes in bytes, shown in GiB (1024³ bytes)."""

    model: str
    """Its class."""
    num_parameters: int
    """Of the whole model."""
    mesh: Mapping[str, int]
    strategy: str
    device: str
    method: str
    """``simulated``, with the depths that it was extrapolated from, or ``model states only``."""
    ranks: tuple[RankMemory, ...]
    """Those asked for."""
    model_states: tuple[MemoryParts, ...] = ()
    """By formula, for the same ranks: parameters, gradients and optimizer states alone."""
    notes: tuple[str, ...] = ()
    """What the numbers rest on."""
    seconds: float = 0.0
    """How long the plan took."""
    simulator_bytes: int = 0
    """The highest resident memory of the simulator's process; 0 in plans by formula."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What else was asked with, in words."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        count = 1
        for size in self.mesh.values():
            count *= size
        return count

    @property
    def worst(self) -> RankMemory:
        """The rank with the highest peak, among those asked for."""
        return max(self.ranks, key=lambda rank: rank.peak.total)

    @property
    def peak_bytes(self) -> int:
        """The highest peak of any rank asked for."""
        return self.worst.peak.total

    def fits(self, gib: float) -> bool:
        """Whether the highest peak is at most so many GiB.

        Raises:
            PlanError: the plan is by formula, so it has no peak; or `gib` is no number.
        """
        if self.method == MODEL_STATES_ONLY:
            raise PlanError("model states only: activations are not in it; memory(…, method='simulate') has the peak.")
        return self.peak_bytes <= real_number("gib", gib, rule="how many GiB there are, such as 80") * GIB

    def to_frame(self, by: str = "rank") -> pd.DataFrame:
        """A table, sizes in GiB.

        Args:
            by: ``rank``: a row for each rank and moment (persistent, peak); ``module``: a row for each module of the
                rank with the highest peak.

        Raises:
            PlanError: `by` is neither.
        """
        import pandas as pd

        if by == "module":
            rows: list[dict[str, Any]] = [
                {"module": item.name or "(model)"} | _gib({f.name: getattr(item, f.name) for f in fields(item)[1:]})
                for item in self.worst.modules
            ]
        elif by == "rank":
            rows = [
                {"rank": rank.rank, **rank.coordinates, "moment": moment}
                | _gib(parts.as_dict() | {"total": parts.total, "host": rank.host_bytes})
                for rank in self.ranks
                for moment, parts in (("persistent", rank.persistent), ("peak", rank.peak))
            ]
        else:
            raise PlanError(f"by={by!r}: it is rank or module.")
        return pd.DataFrame(rows)

    def figure(self) -> Any:
        """Stacked bars of the parts, persistent and at the peak, in GiB: a plotly figure."""
        from axon_nb.plan.memory_display import figure

        return figure(self)

    def __str__(self) -> str:
        """A table in plain text."""
        from axon_nb.plan.memory_display import text

        return text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from axon_nb.plan.memory_display import html

        return html(self)


def _gib(sizes: Mapping[str, int]) -> dict[str, float]:
    return {f"{name}_gib": size / GIB for name, size in sizes.items()}
