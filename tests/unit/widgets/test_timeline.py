"""The timeline's kernel side: facts, pictures and words, clocks, and planned programs."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_nb.cluster.inspection.spans import SpanStore
from axon_nb.records.spans import Span
from axon_nb.records.training.steps import play
from axon_nb.widgets.html import SPAN_PAINTS
from axon_nb.widgets.open import show_planned
from axon_nb.widgets.timeline.content import NOTHING_YET, figures, format_durations, page_facts, summarize
from axon_nb.widgets.timeline.facts import timeline_facts
from axon_nb.widgets.timeline.page import (
    comparison_bundle,
    rank_svg,
    round_step,
    step_svg,
    timeline_bundle,
    timeline_svg,
)
from axon_nb.widgets.timeline.record import PlannedTimeline, timeline_file
from tests.support.records.steps import straggling_spans

MS = 1_000_000

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


def span(rank: int, start: float, end: float, kind: str, **more: Any) -> Span:
    """Times in milliseconds."""
    return Span(rank, kind, more.pop("name", kind), round(start * MS), round(end * MS))._replace(**more)


def filled(*spans: Span, ranks: int = 2) -> SpanStore:
    store = SpanStore()
    store.set_groups({"0": list(range(ranks))})
    store.add(spans)
    return store


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=8)


@given(intervals, intervals, intervals)
def test_communication_overlapping_compute_counts_as_hidden(
    moving: list[tuple[int, int]], computing: list[tuple[int, int]], waiting: list[tuple[int, int]]
) -> None:
    kinds = (("p2p", moving), ("forward", computing), ("wait", waiting))
    spans = [span(0, start, start + length, kind) for kind, found in kinds for start, length in found]
    spans.append(span(0, 0, 1, "cell"))
    (own,) = timeline_facts(filled(*spans).table()).ranks

    def at(found: list[tuple[int, int]], tick: int) -> bool:
        return any(start <= tick < start + length for start, length in found)

    ticks = range(100)
    assert own.communicating * 1e3 == pytest.approx(sum(at(moving, t) for t in ticks))
    hidden = sum(at(moving, t) and at(computing, t) and not at(waiting, t) for t in ticks)
    assert own.hidden * 1e3 == pytest.approx(hidden)
    assert own.waiting * 1e3 == pytest.approx(sum(at(waiting, t) for t in ticks))


def test_backward_after_its_last_collective_is_not_computing() -> None:
    buckets = [span(0, 10, 30, "collective", group="0"), span(0, 40, 60, "collective", group="0")]
    (own,) = timeline_facts(filled(span(0, 0, 60, "backward"), *buckets).table()).ranks
    assert own.communicating == pytest.approx(0.04)
    assert own.hidden == pytest.approx(0.02)


def late(rank: int, start: float, end: float, sequence: int) -> Span:
    return span(rank, start, end, "collective", name="all_reduce", group="0", bytes=400, sequence=sequence)


def test_waits_count_for_the_rank_that_came_last() -> None:
    spans = [
        late(rank, 100 * i + (80 if rank == 2 else rank), 100 * i + 90, i + 1) for i in range(5) for rank in range(3)
    ]
    facts = timeline_facts(filled(*spans, ranks=3).table())
    assert [own.waited_for for own in facts.ranks] == [0, 0, pytest.approx(0.795)]
    assert facts.num_collectives == 5
    assert [own.bytes for own in facts.ranks] == [2000, 2000, 2000]


def test_simultaneous_waits_count_once() -> None:
    both = [late(0, 0, 1010, 1), late(0, 5, 1020, 2), late(1, 1000, 1010, 1), late(1, 1005, 1020, 2)]
    facts = timeline_facts(filled(*both).table())
    assert facts.ranks[1].waited_for == pytest.approx(1.005), "not 2 s"


calls = st.lists(st.tuples(*(st.tuples(st.integers(0, 90), st.integers(1, 30)) for _ in range(3))), max_size=12)


@given(calls)
def test_wait_for_a_rank_is_bounded_by_the_cell(found: list[tuple[tuple[int, int], ...]]) -> None:
    spans = [span(rank, 0, 130, "cell") for rank in range(3)]
    for number, by_rank in enumerate(found, 1):
        end = max(start + length for start, length in by_rank)
        spans += [late(rank, start, end, number) for rank, (start, _) in enumerate(by_rank)]
    for own in timeline_facts(filled(*spans, ranks=3).table()).ranks:
        assert own.waited_for <= 2 * 0.130 + 1e-9


def assert_adds_up(spans: list[Span], ranks: int) -> None:
    """Computing, own code and waiting exclude each other, and are the cell together."""
    for own in timeline_facts(filled(*spans, ranks=ranks).table()).ranks:
        parts = own.forward + own.backward + own.optimizer + own.own_code + own.waiting
        assert parts == pytest.approx(own.cell, rel=1e-6)


@given(intervals, intervals, intervals, intervals)
def test_columns_are_disjoint_and_add_up_to_the_cell(
    forwards: list[tuple[int, int]],
    backwards: list[tuple[int, int]],
    waits: list[tuple[int, int]],
    collectives: list[tuple[int, int]],
) -> None:
    kinds = (("forward", forwards), ("backward", backwards), ("wait", waits), ("collective", collectives))
    spans = [span(0, start, start + length, kind) for kind, found in kinds for start, length in found]
    assert_adds_up([*spans, span(0, 0, 100, "cell")], 1)


def test_columns_of_a_straggling_job_show_the_late_rank() -> None:
    """DDP with a rank that sleeps 40 ms in its own code before each of six steps."""
    spans = straggling_spans(4, steps=6, late=2)
    assert_adds_up(spans, 4)
    facts = timeline_facts(filled(*spans, ranks=4).table())
    for own in facts.ranks:
        assert (own.own_code >= 6 * 0.040) == (own.rank == 2)
        assert (own.waiting >= 6 * 0.035) == (own.rank != 2)
        assert own.waited_for <= 3 * own.cell
    assert max(facts.ranks, key=lambda own: own.waited_for).rank == 2
    assert facts.step == (pytest.approx(0.120, rel=0.02), pytest.approx(0.001, abs=0.002))


def drawn_seconds(svg: str, kind: str, seconds: float) -> float:
    """How long a kind is drawn in the lane of code."""
    paint = next(paint for paint in SPAN_PAINTS if paint.kind == kind)
    width = float(re.search(r'width="(\d+)"', svg)[1])  # type: ignore[index]
    paths = re.findall(rf'd="([^"]*)" fill="{paint.color.both}"', svg)
    boxes = re.findall(r"M[\d.e-]+ ([\d.]+)h([\d.e-]+)", "".join(paths))
    return sum(float(length) for top, length in boxes if float(top) < 10) * seconds / width


def test_picture_shows_straggler_code_and_waiting_peers() -> None:
    table = filled(*straggling_spans(4, steps=6, late=2), ranks=4).table()
    end = int(table.columns["end"].max())
    pictures = [rank_svg(table, rank, 0, end, num_rows=4) for rank in range(4)]
    for rank, svg in enumerate(pictures):
        assert (drawn_seconds(svg, "other", end / 1e9) >= 6 * 0.040) == (rank == 2)
        assert (drawn_seconds(svg, "wait", end / 1e9) >= 6 * 0.035) == (rank != 2)


def test_running_cell_counts_as_user_code_until_its_span_arrives() -> None:
    table = filled(span(0, 50, 60, "forward")).table()
    (own,) = timeline_facts(table, running_since=0).ranks
    assert (own.own_code, own.forward) == (pytest.approx(0.05), pytest.approx(0.01))
    assert timeline_facts(table).ranks[0].own_code == 0


def notice_of(*spans: Span) -> str:
    return str(summarize(filled(*spans, ranks=4).table()).notice)


def test_notice_is_the_first_advice_with_its_gain() -> None:
    notice = notice_of(*straggling_spans(4))
    assert notice.startswith("Rank 2 is a straggler: it runs code of its own, 39.8 ms more per step.")
    assert notice.endswith(" A step takes 33% less then.")


def test_no_notice_without_complete_steps() -> None:
    assert notice_of(*straggling_spans(4, steps=1)) == "None"
    cells = [span(rank, 0, 100, "cell") for rank in range(4)]  # such as print and sleep
    assert notice_of(*cells) == "None"
    assert notice_of(*cells, *(span(rank, 0, 60, "forward") for rank in range(4))) == "None"


def test_no_notice_below_5_percent() -> None:
    def even(rank: int, step: int) -> list[Span]:
        at = 100 * step
        return [span(rank, at, at + 60, "forward"), span(rank, at + 60, at + 99, "optimizer")]

    spans = [one for rank in range(4) for step in range(4) for one in even(rank, step)]
    assert notice_of(*spans, *(span(rank, 0, 400, "cell") for rank in range(4))) == "None"


def test_pipeline_is_compared_with_its_ideal() -> None:
    one = [own._replace(start_ns=2 * own.start_ns, end_ns=own.start_ns + own.end_ns) for own in pipeline_spans()]
    steps = [
        own._replace(start_ns=own.start_ns + 300 * MS * step, end_ns=own.end_ns + 300 * MS * step, sequence=step + 1)
        for step in range(3)
        for own in [*one, span(0, 280, 290, "optimizer"), span(1, 280, 290, "optimizer")]
    ]
    summary = summarize(filled(*steps, *(span(rank, 0, 900, "cell") for rank in range(2))).table())
    assert summary.advice is not None
    assert any(one.claim.startswith("The pipeline is uneven: stage ") for one in summary.advice.advice)


def test_key_figures_include_step_time_and_spread() -> None:
    summary = summarize(filled(*straggling_spans(4), ranks=4).table())
    found = {own["name"]: own["value"] for own in figures(summary)}
    assert list(found) == ["step", "computing", "waiting", "communication hidden"]
    assert found["step"] == "120 ms"
    content = page_facts(summary, range(4))["facts"]
    assert sum(content["shares"].values()) == pytest.approx(1, abs=0.001)
    assert content["notice"]["filter"] == "rank:2"
    for row in content["rows"]:
        assert all(cell["share"] is None or 0 <= cell["share"] <= 1 for cell in row["cells"])


def pipeline_spans() -> list[Span]:
    orders = [[("F", r, 0), ("F", r, 1), ("B", r, 0), ("B", r, 1)] for r in range(2)]
    ideal = play(orders, {"F": 0.01, "B": 0.02})
    return [own._replace(group="1", end_ns=own.end_ns - 2 * MS) for own in ideal]


def test_text_and_html_agree_and_need_no_script() -> None:
    spans = [span(0, 0, 90, "cell", name="In [<3>]"), late(0, 0, 30, 1), late(1, 20, 30, 1), *pipeline_spans()]
    table = filled(*spans).table()
    bundle = timeline_bundle(table, [0, 1, 2], title="In [<3>]")
    words = bundle["text/plain"].splitlines()
    assert words[0] == "Timeline, In [<3>], 3 ranks, 0.09 s"
    assert "communicating 30.0 ms" in words[1]
    assert words[3] == "  rank 2: no span"
    assert "pipeline of ranks 0-1, 2 stages, 2 microbatches" in bundle["text/plain"]
    assert "ideal: 90 ms" in bundle["text/plain"] or "ideal: " in bundle["text/plain"]
    html = bundle["text/html"]
    assert "<script" not in html
    assert "In [&lt;3&gt;]" in html
    assert html.count("data:image/svg+xml;base64,") >= 6
    HTMLParser().feed(html)
    for tick in ("0 s", "0.02 s", "0.08 s"):
        assert f">{tick}<" in html
    assert "step 0" not in html, "no optimizer has stepped"


def test_saved_timeline_marks_steps() -> None:
    spans = [span(rank, 100 * i + 90, 100 * i + 98, "optimizer") for rank in range(2) for i in range(3)]
    spans += [span(rank, 100 * i, 100 * i + 50, "forward") for rank in range(2) for i in range(3)]
    html = timeline_bundle(filled(*spans).table(), [0, 1], title="In [3]")["text/html"]
    widths = re.findall(r'width:([\d.]+)%">(step \d)<', html)
    assert [name for _, name in widths] == ["step 0", "step 1", "step 2"]
    assert float(widths[1][0]) == pytest.approx(100 * 100 / 298, abs=0.1)


def test_empty_timeline_is_described() -> None:
    bundle = timeline_bundle(SpanStore().table(), [0], title="")
    assert bundle["text/plain"].splitlines() == ["Timeline, 1 rank", "  rank 0: no span", NOTHING_YET]
    empty = summarize(SpanStore().table())
    assert page_facts(empty, [0])["facts"]["notes"] == [NOTHING_YET]
    assert page_facts(empty, [0], running=True)["facts"]["notes"] == [], "the first spans may be on their way"


def test_pictures_are_valid_and_show_waiting_in_front_of_a_late_collective() -> None:
    table = filled(late(0, 0, 40, 1), late(1, 30, 40, 1), span(0, 0, 40, "forward"), span(0, 0, 40, "wait")).table()
    drawn = rank_svg(table, 0, 0, 40 * MS, num_rows=2)
    ET.fromstring(drawn)
    colors = {paint.kind: paint.color.both for paint in SPAN_PAINTS}
    assert colors["wait"] in drawn
    assert colors["collective"] in drawn
    assert colors["forward"] not in drawn  # it waits all the time
    step = step_svg(pipeline_spans(), [0, 1], 0.1)
    ET.fromstring(step)
    assert step.count("<path") == 3  # forward, backward, bubble


def test_picture_counts_every_part_of_a_unit() -> None:
    table = filled(*(span(0, i / 10, i / 10 + 0.05, "forward") for i in range(10_000))).table()
    drawn = rank_svg(table, 0, 0, 1000 * MS, num_rows=1)
    assert drawn.count("M") == 1  # half of every unit: one box over all


def test_paper_figure_has_rows_ticks_and_legend() -> None:
    store = filled(*straggling_spans(4), span(0, 1, 2, "forward", name="<b>"), ranks=4)
    root = ET.fromstring(timeline_svg(store.table(), range(4), title="In [<9>]"))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] is not None
    assert texts[0].startswith("In [<9>]: 4 ranks")
    assert {"rank 0", "rank 3", "100 ms", "700 ms", "backward", "waiting", "own code"} <= set(texts)
    assert any(text and text.startswith("Rank 2 is a straggler: ") for text in texts)
    assert len(root.findall("{http://www.w3.org/2000/svg}svg")) >= 4 + 5


@given(st.floats(1e-6, 1e6), st.integers(2, 20))
def test_ticks_are_at_round_steps(length: float, count: int) -> None:
    step = round_step(length, count)
    assert 0.2 * count <= length / step + 1e-9
    assert length / step <= count * (1 + 1e-9)
    assert f"{step:.0e}"[0] in "125"


def test_durations_below_each_other_have_one_unit() -> None:
    assert format_durations([0.012, 0.00528, 0.00877, 0]) == ["12.0 ms", "5.3 ms", "8.8 ms", "–"]
    assert format_durations([5.2, 0.193]) == ["5.20 s", "0.19 s"]
    assert format_durations([0.338, 0.012]) == ["338 ms", "12 ms"]
    assert format_durations([0.0009999]) == ["1.00 ms"]
    assert format_durations([464e-6, 2e-6]) == ["464 µs", "2 µs"]
    assert format_durations([192.0, 0.5]) == ["3 min 12 s", "0.50 s"]


def test_two_cells_are_compared_on_one_scale() -> None:
    before = filled(*(span(rank, 0, 100, "cell") for rank in range(2)), span(0, 10, 50, "forward", name="<b>"))
    after = filled(*(span(rank, 0, 50, "cell") for rank in range(2)), span(0, 10, 30, "forward"))
    bundle = comparison_bundle([("In [7]", before.table()), ("In [9]", after.table())], [0, 1])
    rows = {line.split()[0]: line.split()[1:] for line in bundle["text/plain"].splitlines()[2:]}
    assert rows["cell"] == ["100", "ms", "50", "ms", "−50", "ms", "(−50%)"]
    assert rows["forward"] == ["20", "ms", "10", "ms", "−10", "ms", "(−50%)"]
    assert "In [7] compared with In [9]" in bundle["text/html"]
    assert bundle["text/html"].count("<img") == 4


def test_saved_page_has_the_spans_and_the_script() -> None:
    store = filled(span(0, 0, 3, "forward", name="</script>"), late(0, 3, 9, 1), late(1, 5, 9, 1))
    html = timeline_file(store.table(), [0, 1])
    assert "const make = widget(" in html
    assert "import {" not in html
    assert html.count("</script>") == 4
    assert "export default" not in html


def test_times_of_a_launch_are_named() -> None:
    store = SpanStore()
    store.add(
        Span(rank, "forward", "GPT", 0, 9 * MS, clock=clock)
        for rank, clock in enumerate(("launch", "gpu", "launch", ""))
    )
    text = "Ranks 0,2: some spans show when work was launched, as no event of the GPU was recorded."
    assert page_facts(summarize(store.table()), [0])["facts"]["notes"] == [text]
    bundle = timeline_bundle(store.table(), range(4), title="")
    assert text in bundle["text/plain"]
    assert text in bundle["text/html"]
    assert store.table().to_frame()["clock"].tolist() == ["launch", "gpu", "launch", "host"]


def test_collectives_on_gpus_are_compared_by_their_lengths() -> None:
    """By the starts, which are estimates, rank 1 would be late; it was the first, and waited longest."""
    store = SpanStore()
    store.set_groups({"0": [0, 1]})
    times = ((10, 12), (14, 20))
    store.add(
        Span(rank, "collective", "all_reduce", start * MS, end * MS, "0", sequence=1, clock="gpu")
        for rank, (start, end) in enumerate(times)
    )
    table = store.table()
    assert (table.columns["late"] // MS).tolist() == [0, 4]
    assert table.columns["by"].tolist() == [0, 0]
    assert timeline_facts(table).clock_notes == [
        "Ranks 0-1: the lengths of NCCL's operations are measured, their starts are estimated."
    ]


def test_what_was_slowed_on_purpose_is_in_heading_and_notes() -> None:
    store = SpanStore()
    store.add(
        [
            Span(0, "cell", "In [3]", 0, 5 * MS, "slowed: all links: 100 Mbit/s"),
            Span(0, "cell", "In [4]", 6 * MS, 9 * MS),
        ]
    )
    assert timeline_facts(store.table()).clock_notes == ["Slowed: all links: 100 Mbit/s."]
    bundle = timeline_bundle(store.table(), [0], title="")
    assert bundle["text/plain"].startswith("Timeline, slowed: all links: 100 Mbit/s, 1 rank")


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
