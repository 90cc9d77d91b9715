"""What `%watch` makes of the reports of ranks, the size of an update, and how often panels ask."""

from __future__ import annotations

import json
import math
import re
import struct
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

import axon_nb.widgets
from axon_nb.cluster.inspection.status import JobSnapshot, running_cell
from axon_nb.records.protocol.wire import decode
from axon_nb.records.telemetry import TICK_S, seconds_to_tick
from axon_nb.records.training.job import Bar, JobReport
from axon_nb.widgets import panel as live_view
from axon_nb.widgets.panel import PollSchedule
from axon_nb.widgets.watch.store import MAX_POINTS, JobStore, Point, Series, merge_bars, pack_points
from axon_nb.widgets.watch.view import (
    WatchView,
    chart_html,
    chart_svg,
    context,
    heading,
    is_stepped,
    value_axis,
    watch_bundle,
)
from tests.support.records.jobs import answers, report, row

MAX_UPDATE = 50_000

SILENT = {0: "has not answered", 1: "has not answered"}

GIB = 2**30


def curve(store: JobStore, name: str) -> list[tuple[float, float, float]]:
    """(step, lowest, highest) of each point."""
    return [(point.step, point.low, point.high) for point in store.metrics[name].points()]


def test_ranks_share_one_curve() -> None:
    store = JobStore()
    store.add(answers(report(0, [row(0, loss=3.0), row(1, loss=2.0)]), report(1, [row(0, loss=4.0)])), 0.0)
    store.add(answers(report(0), report(1, [row(1, loss=2.5)])), 0.5)
    assert curve(store, "loss") == [(0, 3.0, 4.0), (1, 2.0, 2.5)]


def measured(second: float, cell: int | None, *rates: float, communication: float | None = None) -> tuple[Any, float]:
    """What ranks report at a moment of a cell."""
    reports = [
        report(rank, cell=cell, steps_per_s=rate, communication=communication) for rank, rate in enumerate(rates)
    ]
    return answers(*reports), second


def test_each_cell_is_a_run_and_earlier_ones_are_pale() -> None:
    store = JobStore()
    store.add(answers(*(report(rank, [row(5, (3, 0), loss=1.0, lr=0.1)], cell=3) for rank in range(2))), 0.0)
    again = row(0, (7, 0), loss=9.0)
    store.add(answers(report(0, [again], cell=7), report(1, [row(6, (3, 0), loss=1.5)], cell=7)), 1.0)
    store.add(answers(report(0, cell=7), report(1, [row(0, (7, 0), loss=8.0)], cell=7)), 2.0)
    assert curve(store, "loss") == [(0, 8.0, 9.0)]
    assert "lr" not in store.metrics, "this cell does not log it"
    (earlier,) = store.earlier("loss", measured=False)
    assert [(point.step, point.low, point.high) for point in earlier.points()] == [(5, 1.0, 1.0), (6, 1.5, 1.5)]
    assert "Pale curves: In [3]." in store.notes()
    html = watch_bundle(store)["text/html"]
    assert "loss · In [7]" in html
    assert html.count(">lr<") == 0
    store.add(answers(report(0, [row(0, (7, 1), is_first=False, loss=7.0)], cell=7)), 3.0)
    assert store.mark(measured=False) == "In [7], run 2"


def test_replaced_rank_joins_the_others_in_its_first_cell() -> None:
    store = JobStore()
    store.add(answers(*(report(rank, [row(250, (3, 0), loss=1.0)], cell=3) for rank in range(2))), 0.0)
    new = report(1, [row(0, (8, 0), loss=0.5)], pid=999, cell=8)
    store.add(answers(report(0, [row(0, (8, 0), is_first=False, loss=1.0)], cell=8), new), 1.0)
    assert curve(store, "loss") == [(0, 0.5, 1.0)]
    (earlier,) = store.earlier("loss", measured=False)
    assert [(point.step, point.low) for point in earlier.points()] == [(250, 1.0)]
    # After a restart of the notebook's kernel, a new rank counts cells from 1.
    store.add(answers(report(1, [row(1, (2, 0), loss=0.25)], pid=1001, cell=8)), 2.0)
    assert curve(store, "loss") == [(0, 0.5, 1.0), (1, 0.25, 0.25)]


def test_rates_are_of_one_cell_and_have_no_line_over_idle_time() -> None:
    store = JobStore()
    for second in range(3):
        store.add(*measured(second, 3, 9.0, 9.5, communication=0.3))
    store.add(*measured(3, None, 9.0, 9.5, communication=0.0))
    store.add(*measured(600, 4, 1.0, 1.5, communication=0.01))
    assert [row.communication for row in store.rows()] == [None, None], "it is that of the time before the cell"
    store.add(*measured(602, 4, 1.0, 1.5, communication=0.8))
    (before,), now = store.earlier("steps/s", measured=True), store.vitals["steps/s"]
    assert [point.step for point in before.points()] == [0, 1, 2]
    assert [point.step for point in now.points()] == [3, 5], "ten minutes without a cell take no space"
    assert (store.steps_per_s, [row.steps_per_s for row in store.rows()]) == (1.0, [1.0, 1.5])
    assert (store.communication, store.mark(measured=True)) == (0.8, "In [4]")
    # A cell without steps has no rate, in the head and in the table.
    store.add(answers(report(0, cell=5), report(1, cell=5)), 700)
    assert (store.steps_per_s, [row.steps_per_s for row in store.rows()]) == (None, [None, None])
    assert "steps/s" not in watch_bundle(store)["text/plain"].splitlines()[0]


def test_schedule_never_shows_a_rate_that_never_was() -> None:
    store = JobStore()
    rows = [row(step, lr=0.01 * 0.5 ** (step // 75)) for step in range(1000)]
    store.add(answers(report(0, rows), report(1, rows)), 0.0)
    points = store.metrics["lr"].points()
    assert len(points) < 200
    assert {point.mean for point in points} <= {0.01 * 0.5**i for i in range(14)}


def test_rates_are_written_out() -> None:
    store = JobStore()
    store.add(answers(report(0, items_per_s=1170.4, bars=[Bar("x", 0, 1, 3, 10.9, False)])), 0.0)
    assert "1,170 items/s" in watch_bundle(store)["text/plain"].splitlines()[0]
    assert store.bars()[0].rate == "10.9 s/it"


def test_one_bar_over_ranks_names_the_slowest() -> None:
    bars = {rank: [Bar("epochs", 0, 30 + 5 * (rank % 3), 100, 10.0, False)] for rank in range(4)}
    (merged,) = merge_bars(bars)
    assert (merged.low, merged.high, merged.is_over) == (0.3, 0.4, False)
    assert merged.text == ("30/100 on ranks 0,3, the slowest; 40/100 on rank 2, the fastest, 3 it/s, 23.3 s left")
    same = merge_bars({0: [Bar("", 0, 7, None, 2.0, False)], 1: [Bar("", 0, 7, None, 2.0, False)]})
    assert same[0].text == "7 it on ranks 0-1, 3.5 it/s"
    over = merge_bars({0: [Bar("x", 0, 4, 10, 2.0, True)], 1: [Bar("x", 0, 4, 10, 2.0, True)]})
    assert over[0].text == "4/10 on ranks 0-1, stopped after 2.0 s"


def test_rank_that_began_the_next_loop_is_ahead() -> None:
    def nested(epoch: int, step: int) -> list[Bar]:
        return [Bar("epochs", 0, epoch, 5, 9.0, False), Bar("steps", 1, step, 50, 4.9, False)]

    epochs, steps = merge_bars({0: nested(3, 0), 1: nested(2, 49), 2: nested(2, 49)})
    assert (epochs.behind, steps.behind) == ("", "")
    assert steps.text == "49/50 on ranks 1-2; rank 0 began the next loop, 10 it/s, 0.10 s left"
    assert (steps.low, steps.high) == (0.98, 1.0)
    _, steps = merge_bars({0: nested(3, 9), 1: nested(2, 49), 2: nested(3, 9)})
    assert steps.behind == "rank 1 is 10 behind"
    _, steps = merge_bars({0: nested(3, 20), 1: nested(3, 9)})
    assert steps.behind == "rank 1 is 11 behind"


def test_running_loops_precede_finished_ones() -> None:
    bars = {0: [Bar("done", 0, 1, 1, 1.0, True), Bar("outer", 0, 1, 2, 1.0, False), Bar("inner", 1, 0, 2, 0.0, False)]}
    assert [bar.desc for bar in merge_bars(bars)] == ["outer", "inner", "done"]


def full(num_ranks: int, names: int = 8, steps: int = 300) -> WatchView:
    """As much as a panel shows."""
    view = WatchView(lambda: None)
    words = "waiting in reduce_scatter_tensor at line 104 for ranks 0-3,5-9,11-63, for 12.1 s"
    bars = [Bar(f"a loop with a long name {i}", i, 10 + i, 100, 3.0, False) for i in range(12)]
    for second in range(steps):
        rows = [row(second, **{f"metric_with_a_name_{i}": 1 / (second + 1) for i in range(names)})]
        reported = [
            report(rank, rows, bars=bars, steps_per_s=12.3 + rank, items_per_s=32.0, communication=0.31)
            for rank in range(num_ranks)
        ]
        view.add([answers(*reported, words=dict.fromkeys(range(num_ranks), words))], float(second))
    view.refresh(unseen=True)
    return view


def size_of(content: Any) -> int:
    """Bytes of an update: JSON, and what travels beside it."""
    extra = 0

    def plain(value: Any) -> Any:
        nonlocal extra
        if isinstance(value, bytes):
            extra += len(value)
            return None
        raise TypeError(type(value))

    return len(json.dumps(content, default=plain)) + extra


def test_update_is_small_for_any_amount_of_data() -> None:
    view = full(72)
    content = view.content
    assert size_of(content) < MAX_UPDATE
    assert len(content["ranks"]) == 64
    assert "8 more ranks are left out of the table." in content["notes"]
    assert len(content["charts"]) == 11
    view.close()


def test_hidden_page_gets_no_messages() -> None:
    view = WatchView(lambda: None)
    before = view.content
    view.add([answers(report(0, [row(0, loss=1.0)]))], 0.0)
    assert view.content is before
    view._handle_custom_msg({"op": "heartbeat"}, [])
    assert view.content["charts"][0]["name"] == "loss"
    assert view.watched
    view.add([answers(report(0, [row(1, loss=0.5)]))], 0.5)
    assert view.content["updates"] == 2
    view.close()


def test_text_matches_the_pictures() -> None:
    store = JobStore()
    reports = [
        report(rank, [row(10, loss=2.0 + rank), row(11, accuracy=math.nan)], steps_per_s=2.0 + rank, items_per_s=32.0,
               communication=0.25 * (rank + 1))
        for rank in range(2)
    ]  # fmt: skip
    words = {1: "waiting in all_reduce at line 4 for rank 0, for 2.1 s", 2: "is dead"}
    for second in range(2):
        store.add(answers(*reports, words=words), float(second))
    lines = watch_bundle(store)["text/plain"].splitlines()
    assert lines[0] == ("3 ranks, In [1] is running: 2 steps/s, 64 items/s, 38 % of the time in communication")
    assert "  loss: 2.5 at step 10 (2 on rank 0 to 3 on rank 1)" in lines
    assert "  communication: 38 % (25 % on rank 0 to 50 % on rank 1)" in lines
    waits = "waiting in all_reduce at line 4 for rank 0, for 2.1 s"
    assert f"  rank 1: {waits}; step 11; 3 steps/s; communication 50 %; 300 MiB" in lines
    assert "  rank 2: is dead" in lines
    assert "accuracy is not finite on ranks 0-1, since step 11." in lines
    assert "No report from rank 2 yet." in lines


def test_page_needs_no_script_and_escapes_names() -> None:
    store = JobStore()
    bar = Bar("<b>", 0, 1, 2, 1.0, False)
    store.add(answers(report(0, [row(0, **{"<i>": 1.0})], bars=[bar]), words={0: "in <all_reduce>"}), 0.0)
    html = watch_bundle(store)["text/html"]
    for text in ("&lt;b&gt;", "&lt;i&gt;", "in &lt;all_reduce&gt;"):
        assert text in html
    assert "<script" not in html
    assert "<svg" not in html, "inline SVG is stripped from notebooks that are not trusted"
    HTMLParser().feed(html)


def test_saved_page_is_small() -> None:
    view = full(8)
    assert len(view.to_bundle()["text/html"]) < 250_000
    view.close()


def test_empty_job_has_a_page() -> None:
    assert watch_bundle(JobStore())["text/plain"] == "0 ranks, no cell is running"


def test_report_is_read_from_json() -> None:
    answer = {
        "rank": 1,
        "state": {"rank": 1, "activity": "running", "time_ns": 5},
        "rows": [{"step": 3, "run": [7, 0], "is_first": True, "values": {"loss": math.nan, "lr": 0.5}}],
        "bars": [{"desc": "x", "depth": 0, "done": 1, "total": None, "seconds": 0.5, "is_over": False, "unit": "it"}],
        **dict.fromkeys(("pid", "position", "lost", "steps", "span_position"), 1),
        **dict.fromkeys(("steps_per_s", "items_per_s", "communication")),
        "is_last": True,
    }
    found = decode(JobReport, json.loads(json.dumps(answer)))
    assert found.rows[0].run == (7, 0)
    assert math.isnan(found.rows[0].values["loss"])
    assert found.bars[0].desc == "x"


def test_page_with_delayed_heartbeats_counts_as_open(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(live_view, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    view = WatchView(lambda: None)
    view.on_cell_start()
    assert not view.watched, "nobody has shown it yet"
    view._handle_custom_msg({"op": "heartbeat"}, [])
    view.on_cell_end()
    view.on_cell_start()
    clock[0] += 60
    assert view.watched, "nothing has come through since the cell began"
    view._handle_custom_msg({"op": "heartbeat"}, [])
    clock[0] += 60
    assert not view.watched, "something had come through: the page is gone"
    view.on_cell_end()
    assert not view.watched
    view.close()


def test_names_without_a_curve_are_listed_and_bounded() -> None:
    store = JobStore()
    store.add(answers(report(0, [row(0, **{f"n{i}": 1.0 for i in range(70)})])), 0.0)
    notes = store.notes()
    assert notes[0].startswith("Only 8 metrics have a curve; not shown: n8, n9, ")
    assert notes[0].endswith(", n19 and 44 more.")
    assert notes[1] == "Only 64 metrics are stored; 6 more were dropped."
    assert len(store.metrics) == 64


def test_loops_and_steps_of_an_earlier_cell_go_with_the_first_of_the_next() -> None:
    store, ended = JobStore(), Bar("epochs", 0, 5, 5, 62.9, True)
    store.add(answers(report(0, [row(9, (4, 0), loss=1.0)], bars=[ended], cell=4)), 0.0)
    store.add(answers(report(0, bars=[ended], cell=None)), 1.0)
    store.add(answers(report(0, bars=[ended], cell=5)), 2.0)
    assert [bar.desc for bar in store.bars()] == ["epochs"], "the last that there are"
    assert store.rows()[0].step is None
    store.add(answers(report(0, [row(0, (5, 0), loss=1.0)], bars=[ended], cell=5)), 3.0)
    assert store.bars() == []
    assert store.rows()[0].step == 0
    store.add(answers(report(0, bars=[ended, Bar("epochs", 0, 1, 5, 1.0, False)], cell=5)), 4.0)
    assert [bar.count for bar in store.bars()] == ["1/5"]


@pytest.mark.parametrize(
    ("cells", "busy", "reported"),
    [
        ({0: 5, 1: 5}, [0, 1], 5),
        ({0: 5}, [0, 1], 5),
        ({0: None}, [1], 0),
        ({}, [0, 1], 0),
        ({0: None, 1: None}, [], None),
        ({0: None, 1: None}, [0, 1], None),
        ({}, [], None),
    ],
)
def test_silent_busy_rank_counts_as_running(cells: dict[int, int | None], busy: list[int], reported: int) -> None:
    assert running_cell({rank: report(rank, cell=cell) for rank, cell in cells.items()}, busy) == reported


def test_cell_number_is_kept_while_ranks_are_silent() -> None:
    store = JobStore()
    store.add(JobSnapshot({}, SILENT, 0), 0.0)
    assert heading(store) == "2 ranks, a cell is running"
    store.add(answers(report(0, cell=5), report(1, cell=5)), 1.0)
    store.add(JobSnapshot({}, SILENT, 0), 2.0)
    assert heading(store).startswith("2 ranks, In [5] is running")
    store.add(JobSnapshot({}, SILENT, None), 3.0)
    assert heading(store).startswith("2 ranks, In [5] has ended")


def test_deliberate_slowness_is_in_the_heading() -> None:
    store = JobStore()
    store.add(JobSnapshot({}, SILENT, 5, slowed="rank 1 × 2"), 0.0)
    assert heading(store) == "2 ranks, In [5] is running, slowed: rank 1 × 2"
    assert context(store) == "In [5] · 2 ranks · slowed: rank 1 × 2"


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


def flat(*values: float) -> list[Point]:
    """A curve that is the same on all ranks."""
    return [Point(step, value, value, value) for step, value in enumerate(values)]


@pytest.mark.parametrize(("kind", "values"), [("rate", (6.4, 5.4)), ("share", (0.3, 0.31)), ("bytes", (98.0, 100.0))])
def test_axes_of_rates_shares_and_bytes_begin_at_zero(kind: str, values: tuple[float, ...]) -> None:
    axis = value_axis(flat(*values), kind)
    assert axis.ticks[0] == axis.low == 0
    assert axis.high >= max(values)
    # A fall by a sixth is a sixth of the height, or less.
    assert axis.place(values[0]) - axis.place(values[1]) == pytest.approx((values[0] - values[1]) / axis.high)


def test_memory_that_grows_by_two_percent_does_not_climb() -> None:
    axis = value_axis(flat(61 * GIB, 62.2 * GIB), "bytes")
    assert axis.place(62.2 * GIB) - axis.place(61 * GIB) < 0.03
    assert [tick / GIB for tick in axis.ticks] == [0, 20, 40, 60, 80]


def test_noise_does_not_fill_the_axis() -> None:
    axis = value_axis(flat(1000.0, 1000.1), "number")
    assert axis.place(1000.1) - axis.place(1000.0) < 0.02


def test_ticks_are_round_and_evenly_spaced() -> None:
    axis = value_axis(flat(1.543, 5.821), "number")
    assert axis.ticks == (0, 1, 2, 3, 4, 5, 6)


def test_piecewise_constant_learning_rate_has_no_slopes() -> None:
    points = flat(*[3e-4] * 5, *[1.5e-4] * 5, *[7.5e-5] * 5)
    assert is_stepped(points)
    (line,) = re.findall(r'd="([^"]*)" fill="none"', chart_svg(points, value_axis(points, "number"), "#123456"))
    assert set(re.findall("[A-Za-z]", line)) == {"M", "H", "V"}
    assert not is_stepped(flat(*(1 / (step + 1) for step in range(15))))
    assert not is_stepped(flat(1.0, 1.0, 1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    "points",
    [
        [],
        [Point(3, 1.0, 1.0, 1.0)],
        [Point(0, 0.0, 0.0, 0.0), Point(5, 0.0, 0.0, 0.0)],
        [Point(0, -1e308, 0.0, 1e308), Point(1, 0.0, 1.0, 2.0)],
        [Point(i, i, i + 1, i + 2) for i in range(240)],
        [Point(0, -5.0, -4.0, -3.0), Point(1, -6.0, -5.0, -3.0)],
    ],
)
@pytest.mark.parametrize("kind", ["number", "rate", "share", "bytes"])
def test_any_curve_has_a_picture(points: list[Point], kind: str) -> None:
    axis = value_axis(points, kind)
    svg = chart_svg(points, axis, "#123456")
    assert ET.fromstring(svg).tag.endswith("svg")
    assert "nan" not in svg
    assert "inf" not in svg
    assert len(svg) < 20_000
    html = chart_html(points, axis, "#123456", alt="<loss>", y_text=str, x_texts=["a", "b"])
    assert "&lt;loss&gt;" in html


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
