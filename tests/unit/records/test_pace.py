"""Steps a second, and how much of a stretch is covered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_nb.records.coverage import covered_ns
from axon_nb.records.pace import Pace, Rates

S = 1_000_000_000


def test_rates_are_those_of_the_last_marks() -> None:
    pace = Pace()
    assert pace.rates(0, running=True) == Rates()
    for i in range(100):
        pace.mark(i * S // 10, items=8)
    rates = pace.rates(99 * S // 10, running=True)
    assert rates.steps == pytest.approx(10)
    assert rates.items == pytest.approx(80)
    for i in range(3):
        pace.mark(1000 * S + i * S, items=0)
    assert pace.rates(1002 * S, running=True).steps == pytest.approx(1)


def test_a_step_that_takes_long_counts_while_it_runs() -> None:
    pace = Pace()
    for i in range(5):
        pace.mark(i * S)
    assert pace.rates(40 * S, running=True).steps == pytest.approx(0.1)
    assert pace.rates(40 * S, running=False).steps == pytest.approx(1)


def test_one_slow_step_after_another_has_a_rate() -> None:
    pace = Pace()
    pace.mark(0)
    pace.mark(60 * S)
    assert pace.rates(61 * S, running=True).steps == pytest.approx(1 / 60)
    twice = Pace()
    twice.mark(5)
    twice.mark(5)
    assert twice.rates(5, running=False) == Rates()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12), st.integers(0, 60), st.integers(0, 60))
def test_what_overlaps_is_counted_once(stretches: list[tuple[int, int]], begin: int, end: int) -> None:
    inside = {t for first, last in stretches for t in range(first, last) if begin <= t < end}
    assert covered_ns(stretches, begin, end) == len(inside)
