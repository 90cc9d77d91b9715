"""Throughput, and how much of a time range intervals cover."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_nb.records.spans import covered_ns
from axon_nb.records.training.job import RateMeter, Throughput

S = 1_000_000_000


def test_rates_come_from_the_last_marks() -> None:
    pace = RateMeter()
    assert pace.rates(0, cell=0) == Throughput()
    for i in range(100):
        pace.mark(i * S // 10, items=8)
    rates = pace.rates(99 * S // 10, cell=0)
    assert rates.steps_per_s == pytest.approx(10)
    assert rates.items_per_s == pytest.approx(80)
    for i in range(3):
        pace.mark(1000 * S + i * S, items=0)
    assert pace.rates(1002 * S, cell=0).steps_per_s == pytest.approx(1)


def test_long_running_step_counts_toward_the_rate() -> None:
    pace = RateMeter()
    for i in range(5):
        pace.mark(i * S)
    assert pace.rates(40 * S, cell=0).steps_per_s == pytest.approx(0.1)
    assert pace.rates(40 * S, cell=None).steps_per_s == pytest.approx(1)


def test_cell_without_steps_has_no_rate() -> None:
    pace = RateMeter()
    for i in range(5):
        pace.mark(i * S)
    assert pace.rates(40 * S, cell=7) == Throughput()


def test_consecutive_slow_steps_have_a_rate() -> None:
    pace = RateMeter()
    pace.mark(0)
    pace.mark(60 * S)
    assert pace.rates(61 * S, cell=0).steps_per_s == pytest.approx(1 / 60)
    twice = RateMeter()
    twice.mark(5)
    twice.mark(5)
    assert twice.rates(5, cell=None) == Throughput()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12), st.integers(0, 60), st.integers(0, 60))
def test_overlaps_are_counted_once(intervals: list[tuple[int, int]], begin: int, end: int) -> None:
    inside = {t for first, last in intervals for t in range(first, last) if begin <= t < end}
    assert covered_ns(intervals, begin, end) == len(inside)
