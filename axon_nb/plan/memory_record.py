"""What a plan of memory says: bytes of each rank, by what they are for, between steps and at the peak.

As text, HTML and a figure each number is in the unit in which the largest is read best.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from axon_nb.plan.asked_numbers import real_number
from axon_nb.plan.communication_table import html_table, text_table
from axon_nb.plan.errors import PlanError
from axon_nb.plan.schedule_picture import plotly_figure
from axon_nb.plan.table_units import unit_for

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["GIB", "MODEL_STATES_ONLY", "PARTS", "MemoryParts", "MemoryPlan", "ModuleMemory", "RankMemory"]

GIB = 1024**3
MODEL_STATES_ONLY = "model states only"
"""The method of a plan by formula: it has no activations and no buffers."""
_MOST_RANKS = 16
_LABELS = {
    "optimizer": "optimizer states",
    "unsharded": "unsharded buffers",
    "communication": "communication buffers",
    "fragmentation": "fragmentation allowance",
}


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
        return _figure(self)

    def __str__(self) -> str:
        """A table in plain text."""
        return _text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _html(self)


def _gib(sizes: Mapping[str, int]) -> dict[str, float]:
    return {f"{name}_gib": size / GIB for name, size in sizes.items()}


def _text(plan: MemoryPlan) -> str:
    """The worst rank's table, and what the numbers rest on."""
    return text_table(f"{_title(plan)}\n{_where(plan)}", *_table(plan.worst), plan.notes)


def _html(plan: MemoryPlan) -> str:
    """The same as a table."""
    return html_table(f"{_title(plan)}. {_where(plan)}", *_table(plan.worst), plan.notes)


def _figure(plan: MemoryPlan) -> Any:
    """Stacked bars, two a rank: persistent and peak; of at most 16 ranks, those with the highest peaks."""
    ranks = sorted(plan.ranks, key=lambda rank: rank.peak.total, reverse=True)[:_MOST_RANKS]
    ranks.sort(key=lambda rank: rank.rank)
    moments = [(rank, moment) for rank in ranks for moment in ("persistent", "peak")]
    axis = [[f"rank {rank.rank}" for rank, _ in moments], [moment for _, moment in moments]]
    unit = unit_for(rank.peak.total for rank in ranks)
    held = [getattr(rank, moment).as_dict() for rank, moment in moments]
    bars = [
        {"type": "bar", "name": _label(part), "x": axis, "y": [unit.of(parts[part]) for parts in held]}
        for part in held[0]
        if any(parts[part] for parts in held)
    ]
    layout = {
        "barmode": "stack",
        "title": {"text": _title(plan).partition(": ")[0]},
        "yaxis": {"title": {"text": unit.name}},
        "legend": {"traceorder": "normal"},
    }
    return plotly_figure(bars, layout)


def _table(rank: RankMemory) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows: what the rank holds, between steps and at its peak."""
    unit = unit_for((rank.persistent.total, rank.peak.total))
    parts = zip(rank.persistent.as_dict().items(), rank.peak.as_dict().values(), strict=True)
    shown = [(_label(part), size, highest) for (part, size), highest in parts if size or highest]
    rows = [*shown, ("total", rank.persistent.total, rank.peak.total)]
    return (
        ("", f"persistent, {unit.name}", f"peak, {unit.name}"),
        [(label, unit.text(size), unit.text(highest)) for label, size, highest in rows],
    )


def _label(part: str) -> str:
    return _LABELS.get(part, part)


def _title(plan: MemoryPlan) -> str:
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    return (
        f"{plan.model}, {plan.num_parameters:,} parameters, {plan.strategy} on {plan.world} "
        f"rank{'s' if plan.world > 1 else ''} ({mesh}), {plan.device}: {plan.method}"
    )


def _where(plan: MemoryPlan) -> str:
    worst, several = plan.worst, len(plan.ranks) > 1
    place = f"Rank {worst.rank}" + (f", the highest peak of {len(plan.ranks)} ranks" if several else "")
    if not worst.phase:
        return place
    where = f" of {worst.module}" if worst.module else ""
    return f"{place}; its peak is in {worst.phase}{where}"
