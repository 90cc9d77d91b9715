"""The picture and the words that remain of a strip."""

from __future__ import annotations

import base64
import re
from xml.etree import ElementTree as ET

import pytest

from axon_nb.records.colors import KINDS
from axon_nb.records.telemetry import Activity, RankState
from axon_nb.widgets.cell.activity import WIDTH, RankHistory, row_svg, strip_bundle

SVG = "{http://www.w3.org/2000/svg}"


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
