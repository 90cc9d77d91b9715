"""Measured and estimated memory of all ranks, ready to be drawn: stacked bars, marks and text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from axon_nb.cluster.inspection.memory import MemorySnapshot
from axon_nb.records.memory import ROLES, MemoryPrediction, MemoryUse
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import format_bytes

__all__ = ["NEAR", "Bar", "MemoryRow", "MemoryRows", "describe_roles", "segments"]

NEAR = 0.9
"""Share of its capacity from which on a rank is flagged."""
_FAR = 5.0
"""A capacity of more than this multiple of the memory in use is written, but not drawn."""
SOURCES = {
    "storages": "storages of live tensors",
    "allocator": "CUDA's allocator, with the storages of live tensors",
    "estimate": "formula",
    "plan": "simulation",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; lengths are shares of the scale, 0 to 1."""

    segments: tuple[tuple[str, float], ...]
    """(role, length), from left to right; without those of length 0."""
    peak: float | None
    capacity: float | None
    """None: unknown, or too large to be drawn."""
    text: str


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One rank."""

    rank: int
    measured: Bar
    estimated: Bar | None
    process: Bar
    """Resident memory, with a scale of its own."""
    flag: str
    """Why the rank needs attention; empty if it does not."""


class MemoryRows:
    """The last replies of the ranks, and the highest use seen so far. Not thread-safe: its owner holds a lock.

    Args:
        title: What is shown, such as ``model``; empty: all variables.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._replies = MemorySnapshot({}, {}, ())
        self._highest: dict[int, int] = {}
        self._simulated: dict[int, MemoryUse] = {}

    def update(self, replies: MemorySnapshot) -> None:
        """Replace the ranks' replies."""
        self._replies = replies
        for rank, use in replies.measured.items():
            self._highest[rank] = max(self._highest.get(rank, 0), use.total)

    def set_simulation(self, prediction: MemoryPrediction | None) -> bool:
        """Show a simulation's estimates instead of formulas, for the ranks that it covers; None: formulas only.

        Returns:
            Whether the estimates have changed.
        """
        before, self._simulated = self._simulated, {} if prediction is None else dict(_simulated_uses(prediction))
        return before != self._simulated

    @property
    def capacity(self) -> int | None:
        """Bytes of the smallest device; None: unknown."""
        return min((use.capacity for use in self._replies.measured.values() if use.capacity), default=None)

    @property
    def estimates(self) -> dict[int, MemoryUse]:
        """What each rank should hold: by simulation if there is one, else by formula."""
        return {**self._replies.estimated, **self._simulated}

    @property
    def heading(self) -> str:
        """Such as ``model: memory of 4 ranks, 1.20 MiB on each; measured: storages of live tensors``."""
        uses = self._replies.measured
        totals = [use.total for use in uses.values()]
        low, high = format_bytes(min(totals, default=0)), format_bytes(max(totals, default=0))
        each = f"{low} on each" if low == high else f"{low} to {high} on a rank"
        count = f"{len(uses)} rank{'' if len(uses) == 1 else 's'}"
        sources = " and ".join(dict.fromkeys(SOURCES.get(use.source, use.source) for use in uses.values()))
        title = f"{self.title}: " if self.title else ""
        return f"{title}memory of {count}, {each}; measured: {sources}"

    @property
    def roles(self) -> list[str]:
        """Roles that any rank uses memory for, in order."""
        uses = [*self._replies.measured.values(), *self.estimates.values()]
        return [role for role in ROLES if any(use.by_role.get(role) for use in uses)]

    def rows(self) -> list[MemoryRow]:
        """Return one row per rank."""
        uses, estimates = self._replies.measured, self.estimates
        scale = _scale(
            [
                *(max(use.total, self._peak(use)) for use in uses.values()),
                *(max(use.total, use.peak or 0) for use in estimates.values()),
            ],
            [use.capacity for use in uses.values() if use.source == "allocator"],
        )
        resident_scale = _scale(
            [max(use.resident, use.resident_peak) for use in uses.values()],
            [use.capacity for use in uses.values() if use.source != "allocator"],
        )
        return [self._row(use, estimates, scale, resident_scale) for _, use in sorted(uses.items())]

    def _peak(self, use: MemoryUse) -> int:
        return self._highest.get(use.rank, 0) if use.peak is None else use.peak

    def _row(self, use: MemoryUse, estimates: Mapping[int, MemoryUse], scale: int, resident_scale: int) -> MemoryRow:
        estimate = estimates.get(use.rank)
        on_device = use.source == "allocator"
        kind = "highest seen" if use.peak is None else "peak"
        peak = self._peak(use)
        texts = [describe_roles(use.by_role), f"{kind} {format_bytes(peak)}" if peak else ""]
        if on_device and use.capacity:
            texts.append(f"of {format_bytes(use.capacity)}")
        return MemoryRow(
            use.rank,
            Bar(
                segments(use.by_role, scale),
                peak / scale if peak else None,
                _share_if_drawn(use.capacity if on_device else None, scale),
                ", ".join(filter(None, texts)),
            ),
            None if estimate is None else _estimate_bar(estimate, scale),
            Bar(
                (("resident", use.resident / resident_scale),),
                use.resident_peak / resident_scale if use.resident_peak else None,
                _share_if_drawn(None if on_device else use.capacity, resident_scale),
                _process_text(use, on_device=on_device),
            ),
            _flag(use),
        )

    def notes(self) -> list[str]:
        """Return sentences on ranks that need attention, and on what is unknown."""
        found = [f"Rank {row.rank}: {row.flag}" for row in self.rows() if row.flag]
        uses = self._replies.measured
        without = [rank for rank, use in uses.items() if "activations" not in use.by_role]
        if without:
            found.append(
                f"Activations of {name_ranks(without)} are unknown: on CPUs no allocator counts them. Resident memory "
                "includes them, along with the interpreter and libraries."
            )
        return [*found, *self._replies.notes]


def _process_text(use: MemoryUse, *, on_device: bool) -> str:
    now, highest = format_bytes(use.resident), format_bytes(use.resident_peak)
    text = f"{now} resident" if now == highest else f"{now} resident, highest {highest}"
    return text if on_device or not use.capacity else f"{text}, of {format_bytes(use.capacity)} available"


def _simulated_uses(prediction: MemoryPrediction) -> Iterator[tuple[int, MemoryUse]]:
    for rank, by_role in prediction.persistent.items():
        peak = sum(prediction.peak[rank].values()) if rank in prediction.peak else None
        yield rank, MemoryUse(rank, 0, "plan", by_role, peak)


def _estimate_bar(estimate: MemoryUse, scale: int) -> Bar:
    text = f"estimate: {describe_roles(estimate.by_role)}"
    if estimate.peak is None:
        return Bar(segments(estimate.by_role, scale), None, None, text)
    text += f" after a step, peak {format_bytes(estimate.peak)}, simulated"
    return Bar(segments(estimate.by_role, scale), estimate.peak / scale, None, text)


def _scale(sizes: Sequence[int], capacities: Sequence[int | None]) -> int:
    highest = max(sizes, default=0) or 1
    drawn = [size for size in capacities if size is not None and size <= _FAR * highest]
    return max([highest, *drawn])


def _share_if_drawn(size: int | None, scale: int) -> float | None:
    return None if size is None or size > scale else size / scale


def segments(by_role: Mapping[str, int], scale: int) -> tuple[tuple[str, float], ...]:
    """Return the bytes of each role as shares of a scale in bytes."""
    return tuple((role, by_role[role] / scale) for role in ROLES if by_role.get(role))


def describe_roles(by_role: Mapping[str, int]) -> str:
    """Return such as ``3.00 MiB (parameters 1.00 MiB, optimizer 2.00 MiB)``."""
    parts = [f"{role} {format_bytes(by_role[role])}" for role in ROLES if by_role.get(role)]
    details = f" ({', '.join(parts)})" if len(parts) > 1 else ""
    return f"{format_bytes(sum(by_role.values()))}{details}"


def _flag(use: MemoryUse) -> str:
    if not use.capacity or use.occupied is None or use.occupied < NEAR * use.capacity:
        return ""
    what = "device" if use.source == "allocator" else "available"
    free = format_bytes(use.capacity - use.occupied)
    return f"{100 * use.occupied / use.capacity:.0f} % of the {what} memory is in use; {free} left."
