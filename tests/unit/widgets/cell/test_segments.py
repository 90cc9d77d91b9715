"""Samples become segments: merged, dated by what they say, and bounded."""

from __future__ import annotations

from itertools import pairwise

import pytest

from axon_nb.records.telemetry import Activity, RankState
from axon_nb.widgets.cell.activity import SILENCE_S, LongestWait, RankHistory

RUNNING, COLLECTIVE, WAITING, DONE = Activity.RUNNING, Activity.COLLECTIVE, Activity.WAITING, Activity.DONE


def feed(history: RankHistory, activity: Activity, now: float, since: float | None = None, **more: object) -> None:
    """One sample at `now` seconds."""
    history.add(RankState(history.rank, activity, int(now * 1e9), **more), now=now, since=since)  # type: ignore[arg-type]


def spans(history: RankHistory) -> list[tuple[str, float, float]]:
    """(activity, start, end) of each segment."""
    return [(segment.activity.value, segment.start, segment.end) for segment in history.segments]


def test_equal_samples_are_one_segment() -> None:
    history = RankHistory(0)
    for i in range(1, 101):
        feed(history, RUNNING, i / 8, since=0.05, line=2 + i % 3)
    assert spans(history) == [("running", 0.05, 12.5)]
    assert (history.segments[0].low, history.segments[0].high, history.segments[0].line) == (2, 4, 3)


def test_change_is_dated_by_the_sample() -> None:
    history = RankHistory(0)
    feed(history, RUNNING, 0.2, since=0.0)
    feed(history, COLLECTIVE, 0.4, since=0.3, call="all_reduce", line=4)
    feed(history, WAITING, 0.6, since=0.3, call="all_reduce", line=4)
    feed(history, RUNNING, 0.8, since=0.8, line=5)
    assert spans(history) == [
        ("running", 0.0, 0.3),
        ("collective", 0.3, 0.6),
        ("waiting", 0.6, 0.8),
        ("running", 0.8, 0.8),
    ]
    assert history.totals == pytest.approx({RUNNING: 0.3, COLLECTIVE: 0.3, WAITING: 0.2})


def test_calls_and_lines_start_separate_segments() -> None:
    history = RankHistory(0)
    feed(history, COLLECTIVE, 0.1, call="all_reduce", line=4)
    feed(history, COLLECTIVE, 0.2, call="all_reduce", line=5)
    feed(history, COLLECTIVE, 0.3, call="broadcast", line=5)
    assert [(segment.call, segment.line) for segment in history.segments] == [
        ("all_reduce", 4),
        ("all_reduce", 5),
        ("broadcast", 5),
    ]


def test_missing_samples_are_a_gap_unless_covered() -> None:
    history = RankHistory(0)
    feed(history, RUNNING, 1.0, since=0.5)
    feed(history, RUNNING, 6.0, since=0.5)
    assert spans(history) == [("running", 0.5, 6.0)]
    feed(history, RUNNING, 11.0, since=10.0)
    assert spans(history) == [("running", 0.5, 6.0), ("running", 10.0, 11.0)]
    assert history.totals[RUNNING] == pytest.approx(6.5)


def test_end_of_a_rank_lasts() -> None:
    history = RankHistory(0)
    feed(history, RUNNING, 1.0, since=0.0)
    feed(history, DONE, 1.5, since=1.4)
    feed(history, DONE, 9.0, since=8.0)
    assert spans(history) == [("running", 0.0, 1.4), ("done", 1.4, 9.0)]
    assert history.last_end(60.0) == 60.0


def test_end_of_a_rank_that_fell_silent_is_its_last_sample() -> None:
    history = RankHistory(0)
    feed(history, RUNNING, 1.0, since=0.0)
    assert history.last_end(1.0 + SILENCE_S) == 1.0 + SILENCE_S
    assert history.last_end(60.0) == 1.0


def test_time_does_not_run_backwards() -> None:
    history = RankHistory(0)
    feed(history, RUNNING, 2.0, since=0.0)
    feed(history, WAITING, 1.0, since=0.5, call="recv")
    feed(history, DONE, 1.5, since=-3.0)
    assert all(segment.start <= segment.end for segment in history.segments)
    assert all(a.end <= b.start for a, b in pairwise(history.segments))


def test_longest_wait_is_kept() -> None:
    history = RankHistory(0)
    feed(history, WAITING, 2.0, since=1.0, call="all_reduce", line=4)
    feed(history, WAITING, 5.0, since=4.5, call="broadcast", line=6)
    assert history.longest_wait == LongestWait(1.0, "all_reduce", 4)


def test_long_cell_stays_bounded_and_its_sums_exact() -> None:
    history = RankHistory(0, limit=256)
    for i in range(20_000):
        activity = WAITING if i % 4 == 3 else RUNNING
        feed(history, activity, (i + 1) / 8, since=i / 8, call="recv" if activity is WAITING else "")
        assert len(history.segments) <= 256
    assert history.generation > 1
    assert sum(history.totals.values()) == pytest.approx(2500.0)
    assert history.totals[WAITING] == pytest.approx(625.0)
    assert 0 < history.coarse_before < 2500
    assert history.segments[0].start == 0.0
    assert all(a.end <= b.start for a, b in pairwise(history.segments))
    coarse = [segment.mixed for segment in history.segments]
    assert coarse == sorted(coarse, reverse=True)


def test_changes_are_tracked() -> None:
    history = RankHistory(0, limit=8)
    feed(history, RUNNING, 1.0)
    history.changed_from = len(history.segments)
    feed(history, RUNNING, 1.1)
    assert history.changed_from == 0
    history.changed_from = len(history.segments)
    feed(history, WAITING, 1.2, call="recv")
    assert history.changed_from == 0, "the end of the segment before has moved"
    for i in range(8):
        history.changed_from = len(history.segments)
        feed(history, RUNNING if i % 2 else WAITING, 2.0 + i, call=str(i))
    assert history.generation == 1
