"""Curves over ranks: what is kept, and how much of it."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_nb.widgets.watch.store import MAX_POINTS, Point, Series, pack_points


def test_point_has_minimum_mean_and_maximum_of_a_step() -> None:
    series = Series("loss")
    for rank, values in enumerate([(4.0, 2.0), (3.0, 1.0), (8.0,)]):
        for step, value in enumerate(values):
            series.add(rank, step, value)
    assert series.points() == [Point(0, 3.0, 5.0, 8.0), Point(1, 1.0, 1.5, 2.0)]
    assert series.latest == {0: (1, 2.0), 1: (1, 1.0), 2: (0, 8.0)}
    assert series.now == Point(1, 1.0, pytest.approx(11 / 3), 8.0)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e6, 1e6)), min_size=1, max_size=400))
def test_no_extreme_is_lost_and_the_size_is_bounded(values: list[tuple[int, float]]) -> None:
    series = Series("loss", limit=16)
    for step, value in values:
        series.add(0, step, value)
    points = series.points()
    assert 1 <= len(points) <= 16
    assert min(p.low for p in points) == min(v for _, v in values)
    assert max(p.high for p in points) == max(v for _, v in values)
    assert all(p.low <= p.mean + 1e-6 and p.mean <= p.high + 1e-6 for p in points)
    assert [p.step for p in points] == sorted({p.step for p in points})


def test_non_finite_values_are_distinguished() -> None:
    series = Series("loss")
    series.add(0, 0, 1.0)
    series.add(1, 0, 2.0)
    series.add(1, 1, math.nan)
    series.add(1, 2, math.inf)
    assert series.points() == [Point(0, 1.0, 1.5, 2.0)]
    assert series.not_finite == {1: 1}
    assert series.now == Point(2, 1.0, 1.0, 1.0)


def test_points_are_packed_by_columns() -> None:
    packed = pack_points([Point(0, 1.0, 2.0, 3.0), Point(1, -1.0, 0.5, 1e300)])
    assert struct.unpack("<8f", packed)[:7] == (0, 1, 1, -1, 2, 0.5, 3)
    assert len(pack_points([])) == 0
    assert len(pack_points([Point(i, 0, 0, 0) for i in range(MAX_POINTS)])) == 16 * MAX_POINTS
