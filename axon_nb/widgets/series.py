"""A curve over all ranks: lowest, mean and highest value at each step, bounded however long the job runs."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["MAX_POINTS", "Point", "Series", "pack_points"]

MAX_POINTS = 160
"""Of one curve; with more, neighbouring steps become one point."""


class Point(NamedTuple):
    """All ranks at one step, or at several that have become one point."""

    step: float
    """The first of them."""
    low: float
    mean: float
    high: float


class Series:
    """The points of one name. Not thread-safe: its owner holds a lock."""

    def __init__(self, name: str, *, limit: int = MAX_POINTS) -> None:
        self.name = name
        self.stride = 1
        """Steps in one point."""
        self.latest: dict[int, tuple[float, float]] = {}
        """The last step of each rank, and its value there."""
        self.not_finite: dict[int, float] = {}
        """Ranks with a value that is no finite number, and the step of the first one."""
        self._limit = limit
        self._points: dict[int, tuple[float, float, float, int]] = {}

    def add(self, rank: int, step: float, value: float) -> None:
        """Take in one value; one that is not finite is remembered apart."""
        if rank not in self.latest or step >= self.latest[rank][0]:
            self.latest[rank] = (step, value)
        if not math.isfinite(value):
            self.not_finite.setdefault(rank, step)
            return
        self._put(int(step // self.stride), value, value, value, 1)
        while len(self._points) > self._limit:
            self._widen()

    def _put(self, place: int, low: float, total: float, high: float, count: int) -> None:
        if (known := self._points.get(place)) is not None:
            low, high = min(low, known[0]), max(high, known[2])
            total, count = total + known[1], count + known[3]
        self._points[place] = (low, total, high, count)

    def _widen(self) -> None:
        old, self._points = self._points, {}
        self.stride *= 2
        for place, (low, total, high, count) in old.items():
            self._put(place // 2, low, total, high, count)

    def points(self) -> list[Point]:
        """In the order of steps."""
        return [
            Point(place * self.stride, low, total / count, high)
            for place, (low, total, high, count) in sorted(self._points.items())
        ]

    @property
    def now(self) -> Point | None:
        """The last value of each rank, as one point; None: there is none."""
        values = [value for _, value in self.latest.values() if math.isfinite(value)]
        if not values:
            return None
        step = max(step for step, _ in self.latest.values())
        return Point(step, min(values), sum(values) / len(values), max(values))


def pack_points(points: Sequence[Point]) -> bytes:
    """Little-endian float32: all steps, then all lows, means and highs; `static/watch/points.js` reads them."""
    columns = zip(*points, strict=True) if points else ((), (), (), ())
    return b"".join(struct.pack(f"<{len(points)}f", *map(_within, column)) for column in columns)


def _within(value: float) -> float:
    return max(-3.4e38, min(3.4e38, value))
