"""The strip of a cell: samples become segments, messages for a page, and the picture that remains."""

from __future__ import annotations

import base64
import json
import re
import struct
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from axon_nb.records.colors import KINDS
from axon_nb.records.telemetry import Activity, RankState
from axon_nb.widgets import RankStrip
from axon_nb.widgets.cell.activity import SILENCE_S, WIDTH, LongestWait, RankHistory, row_svg, strip_bundle
from axon_nb.widgets.html import foldable
from tests.support.kernel import Kernel

RUNNING, COLLECTIVE, WAITING, DONE = Activity.RUNNING, Activity.COLLECTIVE, Activity.WAITING, Activity.DONE

SVG = "{http://www.w3.org/2000/svg}"


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


def header_of(message: bytes) -> dict[str, Any]:
    """The JSON header of a packed message."""
    (size,) = struct.unpack_from("<I", message)
    return dict(json.loads(message[8 : 8 + size]))


@pytest.fixture
def strip() -> Iterator[RankStrip]:
    """A strip of ranks 0 and 2 without a front end."""
    made = RankStrip([0, 2], title="In [1]")
    yield made
    made.finish()


def sample(rank: int, activity: Activity = Activity.RUNNING, **more: Any) -> RankState:
    """A sample taken now."""
    return RankState(rank, activity, time.monotonic_ns(), **more)


def test_samples_from_many_threads_arrive(strip: RankStrip) -> None:
    def work() -> None:
        for i in range(200):
            strip.add([sample(0, call=f"call-{i}"), sample(2)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        strip.flush()
    words = strip.to_bundle()["text/plain"]
    assert "rank 2: running" in words


def test_excess_samples_are_dropped_and_counted(strip: RankStrip) -> None:
    strip.add([sample(0)] * 50_800)
    assert "800 samples lost" in strip.to_bundle()["text/plain"]


def test_ranks_that_are_not_shown_are_left_out(strip: RankStrip) -> None:
    strip.add([sample(1), sample(0)])
    words = strip.to_bundle()["text/plain"]
    assert "rank 1" not in words
    assert "rank 2: no sample" in words


def test_queue_is_bounded_and_says_so(strip: RankStrip) -> None:
    state = sample(0)
    strip.add(state for _ in range(60_000))
    assert "10000 samples lost" in strip.to_bundle()["text/plain"]


def test_clock_of_another_host_is_translated(strip: RankStrip) -> None:
    away_ns = 10**15
    for rank, offset in ((0, 0), (2, away_ns)):
        now = time.monotonic_ns() + offset
        strip.add([RankState(rank, Activity.RUNNING, now, since_ns=now)])
        strip.add([RankState(rank, Activity.WAITING, now + 10**6, since_ns=now, call="recv")])
    strip.add([sample(2, Activity.DONE)])  # the notebook's own word, on its own clock
    words = strip.to_bundle()["text/plain"]
    # Seconds, not the ten days that lie between the clocks.
    assert re.search(r"^  rank 0: waiting in recv, \d{1,3}\.\d", words, re.MULTILINE), words
    assert re.search(r"^  rank 2: done after \d{1,3}\.\d", words, re.MULTILINE), words


def test_finish_is_idempotent(strip: RankStrip) -> None:
    strip.add([sample(0)])
    strip.finish()
    first = strip.to_bundle()["text/plain"].splitlines()[0]
    strip.add([sample(0, Activity.FAILED)])
    strip.flush()
    strip.finish()
    assert strip.to_bundle()["text/plain"].splitlines()[0] == first


CELL = """
import json, time
from axon_nb.records.telemetry import Activity, RankState
from axon_nb.widgets import RankStrip
strip = RankStrip([0, 1], title="In [1]")
strip.start()
strip.flush()
strip.add([RankState(0, Activity.RUNNING, time.monotonic_ns()), RankState(1, Activity.RUNNING, time.monotonic_ns())])
strip.flush()
strip.flush()
strip.add([RankState(0, Activity.RUNNING, time.monotonic_ns())] * 50_002)
strip.flush()
assert not strip.snapshot
state = strip.get_state()
assert len(state["snapshot"]) > 100
assert not strip.snapshot
strip.finish()
strip.finish()
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[BlockingKernelClient]:
    """A client of a kernel."""
    with Kernel() as made:
        yield made.client


def messages_of(kernel: BlockingKernelClient, code: str) -> list[dict[str, Any]]:
    """What a front end gets from a cell that has to succeed."""
    heard: list[dict[str, Any]] = []
    reply = kernel.execute_interactive(code, timeout=120, output_hook=heard.append)
    assert reply["content"]["status"] == "ok", reply["content"]
    return [message for message in heard if message["msg_type"] not in ("status", "execute_input")]


def test_front_end_gets_few_messages(kernel: BlockingKernelClient) -> None:
    heard = messages_of(kernel, CELL)
    appends = [message for message in heard if message["content"].get("data", {}).get("method") == "custom"]
    headers = [header_of(bytes(message["buffers"][0])) for message in appends]
    assert [(header["lost"], header["finished"]) for header in headers] == [(0, False), (2, False), (2, True)]
    assert headers[0]["count"] == 2
    kinds = [message["msg_type"] for message in heard]
    shown = heard[kinds.index("display_data")]["content"]
    assert "application/vnd.jupyter.widget-view+json" in shown["data"]
    assert "comm_close" not in kinds, "it stays as it is when the cell ends"


def history(*samples: tuple[Activity, float], rank: int = 0, **more: object) -> RankHistory:
    """A rank that was seen in these activities at these seconds, each since the one before."""
    made = RankHistory(rank)
    since = 0.0
    for activity, now in samples:
        made.add(RankState(rank, activity, 0, **more), now=now, since=since)  # type: ignore[arg-type]
        since = now
    return made


RUN_WAIT_FAIL = ((Activity.RUNNING, 3.0), (Activity.WAITING, 4.0), (Activity.FAILED, 4.5))


def test_words_say_how_each_rank_ended() -> None:
    ranks = [
        history((Activity.RUNNING, 4.0), (Activity.DONE, 5.0)),
        history(*RUN_WAIT_FAIL, rank=1, call="all_reduce", line=4),
        history((Activity.RUNNING, 1.0), rank=2, line=3),
        history((Activity.RUNNING, 4.0), (Activity.WAITING, 6.0), rank=3, call="recv", line=9),
        RankHistory(4),
        history((Activity.RUNNING, 1.0), (Activity.STOPPED, 2.0), rank=5, call="all_reduce", line=4),
    ]
    words = strip_bundle(ranks, title="In [3]", end=6.0, lost=1)["text/plain"].splitlines()
    longest = "longest call 2.0 s in recv, line 9"
    assert words == [
        "Activity, In [3], 6 ranks, 6.0 s",
        "  rank 0: done after 4.0 s; running 4.0 s",
        "  rank 1: failed after 4.0 s; running 3.0 s; in collectives 1.0 s; longest call 1.0 s in all_reduce, line 4",
        "  rank 2: running, line 3, no sample for 5.0 s; running 1.0 s",
        "  rank 3: waiting in recv, line 9, 2.0 s; running 4.0 s; in collectives 2.0 s; " + longest,
        "  rank 4: no sample",
        "  rank 5: stopped in all_reduce, line 4; running 1.0 s",
        "1 sample lost.",
    ]


def test_rank_without_a_sample_in_its_cell_is_not_called_idle() -> None:
    short = history((Activity.IDLE, 0.1))
    short.add(RankState(0, Activity.DONE, 0), now=0.6, since=0.6)
    assert short.totals[Activity.IDLE] == pytest.approx(0.1)
    assert strip_bundle([short], title="", end=0.7, lost=0)["text/plain"].endswith("rank 0: done after 0.60 s")


def test_html_pictures_are_self_contained() -> None:
    html = strip_bundle([history(*RUN_WAIT_FAIL, call="recv", line=2)], title="<In [1]>", end=5.0, lost=0)["text/html"]
    assert html.startswith("<figure")
    assert "Activity, &lt;In [1]&gt;, 1 rank, 5.0 s" in html
    assert "<script" not in html
    assert "<svg" not in html, "inline SVG is stripped from notebooks that are not trusted"
    images = re.findall(r'<img alt="([^"]*)" src="([^"]*)"', html)
    assert [alt for alt, _ in images if alt] == [
        "rank 0: failed after 4.0 s; running 3.0 s; in collectives 1.0 s; longest call 1.0 s in recv, line 2"
    ]
    for _, address in images:
        kind, _, content = address.partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert ET.fromstring(base64.b64decode(content)).tag == f"{SVG}svg"
    assert not re.search(r'(src|href)="(?!data:)', html)
    (caption,) = re.findall("<summary>(.*?)</summary>", foldable(html))
    assert caption == "<b>Activity, &lt;In [1]&gt;, 1 rank, 5.0 s</b>", "a fold has no legend"


def test_picture_is_to_scale() -> None:
    svg = ET.fromstring(row_svg(history((Activity.RUNNING, 3.0), (Activity.WAITING, 6.0)), 6.0))
    boxes = {path.get("fill"): path.get("d") for path in svg.iter(f"{SVG}path") if path.get("fill", "").startswith("#")}
    forward, wait = KINDS["forward"].both, KINDS["wait"].both
    assert boxes == {forward: "M0 2h300v12h-300z", wait: "M300 2h300v12h-300z"}


def test_picture_of_a_busy_hour_is_small() -> None:
    busy = history(*((Activity.RUNNING if i % 2 else Activity.WAITING, i / 8) for i in range(3600 * 8)))
    assert len(row_svg(busy, 3600.0)) < 30 * WIDTH


@pytest.mark.parametrize("end", [0.0, 0.004, 1.0, 59.9, 7200.0, 400_000.0])
def test_any_length_has_a_bundle(end: float) -> None:
    bundle = strip_bundle([history((Activity.DONE, end)), RankHistory(1)], title="", end=end, lost=0)
    assert set(bundle) == {"text/html", "text/plain"}
    assert bundle["text/html"].count('<td style="padding:0 0 0 3px') <= 7


def test_merged_segments_are_mentioned() -> None:
    long = RankHistory(0, limit=16)
    for i in range(64):
        long.add(RankState(0, Activity.RUNNING if i % 2 else Activity.IDLE, 0), now=float(i))
    bundle = strip_bundle([long], title="", end=64.0, lost=0)
    assert "short segments are merged" in bundle["text/plain"]
    assert "short segments are merged" in bundle["text/html"]


def test_many_ranks_leave_a_picture_of_those_that_stand_out() -> None:
    ranks = [
        history((Activity.RUNNING, 1.0), (Activity.WAITING, 5.0), (Activity.DONE, 5.5), rank=rank, call="all_reduce")
        for rank in range(1024)
    ]
    ranks[700] = history((Activity.RUNNING, 4.0), (Activity.FAILED, 5.5), rank=700)
    ranks[300] = history((Activity.RUNNING, 5.0), (Activity.DONE, 5.5), rank=300)
    bundle = strip_bundle(ranks, title="In [3]", end=6.0, lost=0)
    lines = bundle["text/plain"].splitlines()
    assert lines[0] == "Activity, In [3], 1024 ranks, 6.0 s"
    assert len(lines) == 66
    assert {"  rank 300: done after 5.0 s; running 5.0 s", "  rank 700: failed after 4.0 s; running 4.0 s"} <= {*lines}
    assert lines[-1] == (
        "960 of 1024 ranks are left out; shown are those that ended otherwise than most, and then those that waited "
        "least."
    )
    assert bundle["text/html"].count("<img") == 64 + bundle["text/html"].partition("<table")[0].count("<img")
