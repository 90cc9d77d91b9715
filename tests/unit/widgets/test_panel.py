"""Panels: loaded when they are asked for, and how often they ask ranks."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

import axon_nb.widgets
from axon_nb.records.telemetry import TICK_S, seconds_to_tick
from axon_nb.widgets.panel import PollSchedule


def test_expensive_answers_are_polled_less_often() -> None:
    schedule = PollSchedule(2 * TICK_S)
    intervals = []
    for seconds in (0.05, 0.02, 0.001, 9.0, 9.0, 0.0):
        schedule.record_cost(seconds)
        intervals.append(schedule.interval_s / TICK_S)
    # One answer that costs more than those around it, such as the first, changes nothing.
    assert intervals == pytest.approx([2, math.ceil(5 / TICK_S), 2, 2, math.ceil(10 / TICK_S), 2])


def test_views_poll_at_the_same_times() -> None:
    schedules = [PollSchedule(least * TICK_S) for least in (0.1, 1.0, 1.4, 3.0)]
    assert [schedule.interval_s / TICK_S for schedule in schedules] == pytest.approx([1, 1, 2, 3])
    for schedule in schedules:
        for now in (1000.0, 1000.4, 1000.75, 1234.567):
            wait = seconds_to_tick(schedule.interval_s, now=now)
            assert 0 < wait <= schedule.interval_s
            assert (now + wait) / TICK_S == pytest.approx(round((now + wait) / TICK_S))
    assert seconds_to_tick(1.0, now=7.0, late_s=0.25) == pytest.approx(0.25)


def test_import_loads_no_widget() -> None:
    code = "import sys, axon_nb.widgets; assert not {'anywidget', 'ipywidgets', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_are_those_of_their_modules() -> None:
    from axon_nb.widgets.cell.views import RankStrip

    assert dir(axon_nb.widgets) == sorted(axon_nb.widgets.__all__)
    assert axon_nb.widgets.RankStrip is RankStrip
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = axon_nb.widgets.nothing
