"""How often ranks are asked follows from what their answers cost."""

from __future__ import annotations

import math

import pytest

from axon_nb.records.telemetry import TICK_S, seconds_to_tick
from axon_nb.widgets.panel import Pace


def test_what_costs_much_is_asked_more_seldom() -> None:
    pace = Pace(2 * TICK_S)
    beats = []
    for seconds in (0.05, 0.02, 0.001, 9.0, 9.0, 0.0):
        pace.took(seconds)
        beats.append(pace.every_s / TICK_S)
    # One answer that costs more than those around it, such as the first, changes nothing.
    assert beats == pytest.approx([2, math.ceil(5 / TICK_S), 2, 2, math.ceil(10 / TICK_S), 2])


def test_all_views_ask_at_the_same_moments() -> None:
    paces = [Pace(least * TICK_S) for least in (0.1, 1.0, 1.4, 3.0)]
    assert [pace.every_s / TICK_S for pace in paces] == pytest.approx([1, 1, 2, 3])
    for pace in paces:
        for now in (1000.0, 1000.4, 1000.75, 1234.567):
            wait = seconds_to_tick(pace.every_s, now=now)
            assert 0 < wait <= pace.every_s
            assert (now + wait) / TICK_S == pytest.approx(round((now + wait) / TICK_S))
    assert seconds_to_tick(1.0, now=7.0, late_s=0.25) == pytest.approx(0.25)
