"""A curve over all ranks: lowest, mean and highest value at each step, bounded however long the job runs."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

MAX_POINTS = 160
"""Of one curve; with more, neighbouring steps are merged into one point."""


class Point(NamedTuple):
    """All ranks at one step, or at several that were merged."""

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
        """Ranks with a value that is not finite, and the step of the first such value."""
        self._limit = limit
        self._points: dict[int, tuple[float, float, float, int]] = {}

    def add(self, rank: int, step: float, value: float) -> None:
        """Add one value; one that is not finite is noted separately."""
        if rank not in self.latest or step >= self.latest[rank][0]:
            self.latest[rank] = (step, value)
        if not math.isfinite(value):
            self.not_finite.setdefault(rank, step)
            return
        self._merge(int(step // self.stride), value, value, value, 1)
        while len(self._points) > self._limit:
            self._double_stride()

    def _merge(self, index: int, low: float, total: float, high: float, count: int) -> None:
        if (earlier := self._points.get(index)) is not None:
            low, high = min(low, earlier[0]), max(high, earlier[2])
            total, count = total + earlier[1], count + earlier[3]
        self._points[index] = (low, total, high, count)

    def _double_stride(self) -> None:
        old, self._points = self._points, {}
        self.stride *= 2
        for index, (low, total, high, count) in old.items():
            self._merge(index // 2, low, total, high, count)

    def points(self) -> list[Point]:
        """Return the points in the order of steps."""
        return [
            Point(index * self.stride, low, total / count, high)
            for index, (low, total, high, count) in sorted(self._points.items())
        ]

    @property
    def now(self) -> Point | None:
        """The last value of each rank, as one point; None if there is none."""
        values = [value for _, value in self.latest.values() if math.isfinite(value)]
        if not values:
            return None
        step = max(step for step, _ in self.latest.values())
        return Point(step, min(values), sum(values) / len(values), max(values))


def pack_points(points: Sequence[Point]) -> bytes:
    """Pack as little-endian float32 all steps, then all lows, means and highs, for `static/watch/points.js`."""
    columns = zip(*points, strict=True) if points else ((), (), (), ())
    return b"".join(struct.pack(f"<{len(points)}f", *map(_clamp, column)) for column in columns)


def _clamp(value: float) -> float:
    return max(-3.4e38, min(3.4e38, value))
