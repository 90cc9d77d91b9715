"""Arithmetic on many intervals of time: unions, what several sets cover, and where a backward can only wait."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]
Intervals = tuple[Times, Times]
"""Starts and ends in nanoseconds; they may overlap and need no order."""


def join(*sets: Intervals) -> Intervals:
    """Return all intervals of several sets as one set."""
    return np.concatenate([starts for starts, _ in sets]), np.concatenate([ends for _, ends in sets])


def coverage(*sets: Intervals) -> tuple[list[npt.NDArray[np.bool_]], Times]:
    """Return the intervals between all starts and ends: whether each set covers them, and their lengths."""
    points = np.concatenate([times for pair in sets for times in pair])
    order = np.argsort(points, kind="stable")
    covered = []
    offset = 0
    for starts, ends in sets:
        steps = np.zeros(len(points), dtype=np.int64)
        steps[offset : offset + len(starts)] = 1
        steps[offset + len(starts) : offset + len(starts) + len(ends)] = -1
        offset += len(starts) + len(ends)
        covered.append(np.cumsum(steps[order])[:-1] > 0)
    return covered, np.diff(points[order])


def union(intervals: Intervals) -> Intervals:
    """Return the union as intervals that do not overlap, in order."""
    order = np.argsort(intervals[0], kind="stable")
    starts, ends = intervals[0][order], np.maximum.accumulate(intervals[1][order]) if len(order) else intervals[1]
    is_first = np.ones(len(starts), dtype=bool)
    is_first[1:] = starts[1:] > ends[:-1]
    is_last = np.append(is_first[1:], True) if len(starts) else is_first
    return starts[is_first], ends[is_last]


def union_ns(intervals: Intervals) -> int:
    """Return the length of the union in nanoseconds."""
    starts, ends = union(intervals)
    return int((ends - starts).sum())


def subtract(intervals: Intervals, holes: Intervals) -> Intervals:
    """Return the part of the intervals' union outside all holes, in order."""
    points = np.sort(np.concatenate((*intervals, *holes)), kind="stable")
    (is_inside, is_hole), _ = coverage(intervals, holes)
    kept = is_inside & ~is_hole & (points[:-1] < points[1:])
    return union((points[:-1][kept], points[1:][kept]))


def tails(backwards: Intervals, communication: Intervals) -> Intervals:
    """Return the time of each backward from the start of its last communication to the end of either.

    Nothing is left to compute then, so the rank waits: DDP does so in C++, where no span is recorded.
    """
    order = np.argsort(communication[0], kind="stable")
    starts, ends = communication[0][order], communication[1][order]
    if not len(starts):
        return starts, ends
    last = np.searchsorted(starts, backwards[1]) - 1
    inside = (last >= 0) & (starts[last] >= backwards[0])
    return starts[last[inside]], np.minimum(ends[last[inside]], backwards[1][inside])
