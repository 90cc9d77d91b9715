"""The clock of another host is estimated from messages whose times on both hosts are known exactly."""

from __future__ import annotations

import random

import pytest

from axon_nb.records.spans import ClockEstimate

MS = 1_000_000


def exchanges(
    estimate: ClockEstimate, *, ahead_ns: float, drift: float = 0.0, delay_ns: int, jitter_ns: int, seconds: int
) -> tuple[int, int]:
    """Ask twice per second; return the time of the last answer, and the true offset then."""
    randomness, now = random.Random(1), 0
    for asked in range(0, seconds * 1000 * MS, 500 * MS):
        there, back = (delay_ns + int(randomness.expovariate(1 / jitter_ns)) for _ in range(2))
        arrived, now = asked + there, asked + there + back + MS

        def other(time_ns: int) -> int:
            return round(time_ns * (1 + drift) + ahead_ns)

        estimate.add(asked, other(arrived), other(arrived + MS), now)
    return now, round(-ahead_ns - drift * now)


@pytest.mark.parametrize("drift", [0.0, 5e-5, -5e-5])
def test_offset_is_within_a_millisecond_over_a_slow_link_and_follows_drift(drift: float) -> None:
    estimate = ClockEstimate()
    now, offset = exchanges(estimate, ahead_ns=5e15, drift=drift, delay_ns=5 * MS, jitter_ns=3 * MS, seconds=600)
    clock = estimate.at(now)
    assert clock is not None
    assert abs(clock.offset_ns - offset) < MS
    assert abs(clock.offset_ns - offset) <= clock.error_ns < 7 * MS


def test_error_holds_for_a_link_that_delays_one_direction_only() -> None:
    estimate = ClockEstimate()
    estimate.add(0, 1000 * MS + 10 * MS, 1000 * MS + 10 * MS, 11 * MS)
    clock = estimate.at(11 * MS)
    assert clock is not None
    assert abs(clock.offset_ns + 1000 * MS) <= clock.error_ns == 5.5 * MS


def test_error_grows_while_nothing_is_heard() -> None:
    estimate = ClockEstimate()
    assert estimate.at(0) is None
    estimate.add(0, MS, MS, 2 * MS)
    soon, late = estimate.at(2 * MS), estimate.at(60_000 * MS)
    assert soon is not None
    assert late is not None
    assert (soon.offset_ns, late.offset_ns) == (0, 0)
    assert late.error_ns > soon.error_ns + 5 * MS


def test_host_that_was_suspended_is_estimated_again() -> None:
    estimate = ClockEstimate()
    estimate.add(0, MS, MS, 2 * MS)
    estimate.add(500 * MS, 101 * MS, 101 * MS, 502 * MS)
    clock = estimate.at(502 * MS)
    assert clock is not None
    assert (clock.offset_ns, clock.error_ns) == (400 * MS, MS)
