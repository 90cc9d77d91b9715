"""Measured and estimated memory of all ranks, ready to be drawn: stacked bars, marks, and words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from axon_nb.cluster.inspection.memory import MemorySnapshot
from axon_nb.records.memory import ROLES, MemoryPrediction, MemoryUse
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import format_bytes

__all__ = ["NEAR", "Bar", "MemoryRow", "MemoryRows", "roles_in_words", "segments"]

NEAR = 0.9
"""A rank with so much of its capacity taken is flagged."""
_FAR = 5.0
"""A capacity that is so many times what is there is told, and not drawn."""
SOURCES = {
    "storages": "storages of live tensors",
    "allocator": "CUDA's allocator, with the storages of live tensors",
    "estimate": "formula",
    "plan": "simulation",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; lengths are parts of the scale, 0 to 1."""

    segments: tuple[tuple[str, float], ...]
    """(role, length), from left to right; those without length left out."""
    peak: float | None
    capacity: float | None
    """None: not known, or beyond what is drawn."""
    words: str


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One rank."""

    rank: int
    measured: Bar
    estimated: Bar | None
    process: Bar
    """Resident memory, with a scale of its own."""
    flag: str
    """Why it needs attention; empty when it does not."""


class MemoryRows:
    """Keeps what was told last, and the highest of what was seen. Not thread-safe: its owner holds a lock.

    Args:
        title: What is shown, such as ``model``; empty: all variables.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._answers = MemorySnapshot({}, {}, ())
        self._highest: dict[int, int] = {}
        self._expected: dict[int, MemoryUse] = {}

    def take(self, answers: MemorySnapshot) -> None:
        """Show these instead."""
        self._answers = answers
        for rank, use in answers.measured.items():
            self._highest[rank] = max(self._highest.get(rank, 0), use.total)

    def expect(self, estimate: MemoryPrediction | None) -> bool:
        """Show what a simulation says beside what is measured, of the ranks that it knows; None: formulas alone.

        Returns:
            Whether that is something else than before.
        """
        before, self._expected = self._expected, {} if estimate is None else dict(_expected(estimate))
        return before != self._expected

    @property
    def capacity(self) -> int | None:
        """What the smallest of the devices has, in bytes; None: not known."""
        return min((use.capacity for use in self._answers.measured.values() if use.capacity), default=None)

    @property
    def estimates(self) -> dict[int, MemoryUse]:
        """What each rank should hold: by simulation where there is one, else by formula."""
        return {**self._answers.estimated, **self._expected}

    @property
    def heading(self) -> str:
        """Such as ``model: memory of 4 ranks, 1.20 MiB on each; measured: storages of live tensors``."""
        uses = self._answers.measured
        totals = [use.total for use in uses.values()]
        low, high = format_bytes(min(totals, default=0)), format_bytes(max(totals, default=0))
        each = f"{low} on each" if low == high else f"{low} to {high} on a rank"
        count = f"{len(uses)} rank{'' if len(uses) == 1 else 's'}"
        sources = " and ".join(dict.fromkeys(SOURCES.get(use.source, use.source) for use in uses.values()))
        title = f"{self.title}: " if self.title else ""
        return f"{title}memory of {count}, {each}; measured: {sources}"

    @property
    def roles(self) -> list[str]:
        """Those that any rank has something of, in order."""
        uses = [*self._answers.measured.values(), *self.estimates.values()]
        return [role for role in ROLES if any(use.by_role.get(role) for use in uses)]

    def rows(self) -> list[MemoryRow]:
        """One a rank."""
        uses, estimates = self._answers.measured, self.estimates
        scale = _scale(
            [
                *(max(use.total, self._peak(use)) for use in uses.values()),
                *(max(use.total, use.peak or 0) for use in estimates.values()),
            ],
            [use.capacity for use in uses.values() if use.source == "allocator"],
        )
        resident = _scale(
            [max(use.resident, use.resident_peak) for use in uses.values()],
            [use.capacity for use in uses.values() if use.source != "allocator"],
        )
        return [self._row(use, estimates, scale, resident) for _, use in sorted(uses.items())]

    def _peak(self, use: MemoryUse) -> int:
        return self._highest.get(use.rank, 0) if use.peak is None else use.peak

    def _row(self, use: MemoryUse, estimates: Mapping[int, MemoryUse], scale: int, resident: int) -> MemoryRow:
        estimate = estimates.get(use.rank)
        on_device = use.source == "allocator"
        kind = "highest seen" if use.peak is None else "peak"
        peak = self._peak(use)
        told = [roles_in_words(use.by_role), f"{kind} {format_bytes(peak)}" if peak else ""]
        if on_device and use.capacity:
            told.append(f"of {format_bytes(use.capacity)}")
        process = _process_words(use, on_device=on_device)
        parts = (("resident", use.resident / resident),)
        return MemoryRow(
            use.rank,
            Bar(
                segments(use.by_role, scale),
                peak / scale if peak else None,
                _within(use.capacity if on_device else None, scale),
                ", ".join(filter(None, told)),
            ),
            None if estimate is None else _estimate_bar(estimate, scale),
            Bar(
                parts,
                use.resident_peak / resident if use.resident_peak else None,
                _within(None if on_device else use.capacity, resident),
                process,
            ),
            _flag(use),
        )

    def notes(self) -> list[str]:
        """Sentences: what is not known."""
        found = [f"Rank {row.rank}: {row.flag}" for row in self.rows() if row.flag]
        uses = self._answers.measured
        without = [rank for rank, use in uses.items() if "activations" not in use.by_role]
        if without:
            found.append(
                f"Activations of {name_ranks(without)} are unknown: on CPUs no allocator counts them. Resident memory "
                "includes them, along with the interpreter and libraries."
            )
        return [*found, *self._answers.notes]


def _process_words(use: MemoryUse, *, on_device: bool) -> str:
    now, highest = format_bytes(use.resident), format_bytes(use.resident_peak)
    words = f"{now} resident" if now == highest else f"{now} resident, highest {highest}"
    return words if on_device or not use.capacity else f"{words}, of {format_bytes(use.capacity)} it could have"


def _expected(estimate: MemoryPrediction) -> Iterator[tuple[int, MemoryUse]]:
    for rank, held in estimate.persistent.items():
        peak = sum(estimate.peak[rank].values()) if rank in estimate.peak else None
        yield rank, MemoryUse(rank, 0, "plan", held, peak)


def _estimate_bar(estimate: MemoryUse, scale: int) -> Bar:
    words = f"estimate: {roles_in_words(estimate.by_role)}"
    if estimate.peak is None:
        return Bar(segments(estimate.by_role, scale), None, None, words)
    words += f" after a step, peak {format_bytes(estimate.peak)}, simulated"
    return Bar(segments(estimate.by_role, scale), estimate.peak / scale, None, words)


def _scale(sizes: Sequence[int], capacities: Sequence[int | None]) -> int:
    most = max(sizes, default=0) or 1
    near = [size for size in capacities if size is not None and size <= _FAR * most]
    return max([most, *near])


def _within(size: int | None, scale: int) -> float | None:
    return None if size is None or size > scale else size / scale


def segments(by_role: Mapping[str, int], scale: int) -> tuple[tuple[str, float], ...]:
    """A bar of so many bytes, as parts of a scale in bytes."""
    return tuple((role, by_role[role] / scale) for role in ROLES if by_role.get(role))


def roles_in_words(by_role: Mapping[str, int]) -> str:
    """Such as ``3.00 MiB (parameters 1.00 MiB, optimizer 2.00 MiB)``."""
    parts = [f"{role} {format_bytes(by_role[role])}" for role in ROLES if by_role.get(role)]
    together = f" ({', '.join(parts)})" if len(parts) > 1 else ""
    return f"{format_bytes(sum(by_role.values()))}{together}"


def _flag(use: MemoryUse) -> str:
    if not use.capacity or use.occupied is None or use.occupied < NEAR * use.capacity:
        return ""
    what = "the device's memory is taken" if use.source == "allocator" else "what it could have is taken"
    return f"{100 * use.occupied / use.capacity:.0f} % of {what}: {format_bytes(use.capacity - use.occupied)} are left."
