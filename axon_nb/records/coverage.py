"""How much of a time range a set of intervals covers."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["covered_ns"]


def covered_ns(intervals: Iterable[tuple[int, int]], begin: int, end: int) -> int:
    """Nanoseconds between `begin` and `end` covered by at least one (begin, end) interval."""
    total, reached = 0, begin
    for first, last in sorted(intervals):
        left, right = max(first, reached), min(last, end)
        if right > left:
            total += right - left
            reached = right
    return total
