"""How much of a stretch of time others cover, with what overlaps counted once."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["covered_ns"]


def covered_ns(stretches: Iterable[tuple[int, int]], begin: int, end: int) -> int:
    """Nanoseconds between `begin` and `end` that at least one of the stretches (begin, end) covers."""
    total, reached = 0, begin
    for first, last in sorted(stretches):
        left, right = max(first, reached), min(last, end)
        if right > left:
            total += right - left
            reached = right
    return total
