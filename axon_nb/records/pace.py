"""How fast something goes on: steps and items a second, from the times of the last ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["Pace", "Rates"]

_WINDOW_NS = 10_000_000_000
_SLOW = 2.0
"""A step that takes so many times as long as those before counts although it is not over."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What comes in a second; None where it is not known."""

    steps: float | None = None
    items: float | None = None


class Pace:
    """The last marks, at most `capacity`; marked on one thread, read by any."""

    def __init__(self, capacity: int = 256) -> None:
        self._marks: deque[tuple[int, int, float]] = deque(maxlen=capacity)
        self._steps = 0
        self._items = 0.0

    @property
    def steps(self) -> int:
        """All steps so far."""
        return self._steps

    def mark(self, now_ns: int, *, steps: int = 1, items: float = 0.0) -> None:
        """So many steps more are over, with so many items."""
        self._steps += steps
        self._items += items
        self._marks.append((now_ns, self._steps, self._items))

    def rates(self, now_ns: int, *, running: bool) -> Rates:
        """Over the last ten seconds in which there were steps, or over the last step when it took longer.

        Args:
            now_ns: The time, in nanoseconds of the clock of the marks.
            running: Whether a cell runs: the step that it is in counts when it takes long.
        """
        marks = list(self._marks)
        if len(marks) < 2:
            return Rates()
        last = marks[-1]
        recent = [mark for mark in marks if last[0] - mark[0] <= _WINDOW_NS]
        first = (recent if len(recent) > 1 else marks[-2:])[0]
        took, steps, items = last[0] - first[0], last[1] - first[1], last[2] - first[2]
        if running and now_ns - last[0] > _SLOW * took / max(1, steps):
            took = now_ns - first[0]
        if took <= 0:
            return Rates()
        return Rates(steps * 1e9 / took, items * 1e9 / took if items else None)
