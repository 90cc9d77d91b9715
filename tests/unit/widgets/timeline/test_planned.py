"""The timeline of a planned program."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from axon_nb.records.spans import Span
from axon_nb.widgets.open import show_planned
from axon_nb.widgets.timeline.record import PlannedTimeline

SPANS = [
    Span(rank, kind, name, start, end, group, size)
    for rank in (0, 7)
    for kind, name, start, end, group, size in (
        ("cell", "program", 0, 9_000_000, "", 0),
        ("forward", "forward", 0, 3_000_000, "", 0),
        ("collective", "all_reduce", 2_000_000, 6_000_000, "8 ranks from 0", 1 << 20),
        ("wait", "wait", 3_000_000, 6_000_000, "", 0),
        ("optimizer", "optimizer", 6_000_000, 9_000_000, "", 0),
    )
]


def test_notebook_view_matches_the_saved_page(tmp_path: Path) -> None:
    timeline = PlannedTimeline(SPANS, "train on 8 ranks of h100")
    view = timeline.view()
    timeline.save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    saved = re.search(r'id="spans">([^<]+)<', page)
    assert saved is not None
    assert base64.b64decode(saved[1]) == view.snapshot
    assert view.config["ranks"] == [0, 7]
    assert view.config["title"] == "train on 8 ranks of h100"


def test_planned_timeline_is_saved_as_trace_and_table(tmp_path: Path) -> None:
    timeline = PlannedTimeline(SPANS, "train")
    timeline.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 7}
    assert timeline.to_frame().groupby("rank").seconds.sum().round(6).to_dict() == {0: 0.022, 7: 0.022}


def test_planned_timeline_is_text_outside_notebooks(capsys: pytest.CaptureFixture[str]) -> None:
    show_planned(SPANS, "train on 8 ranks of h100")
    shown = capsys.readouterr().out
    assert "Timeline, train on 8 ranks of h100, 2 ranks" in shown
    assert "rank 7: forward 3.00 ms" in shown
