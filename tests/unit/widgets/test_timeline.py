"""The timeline's kernel side: facts, pictures and words, and the messages that a page gets."""

from __future__ import annotations

import json
import struct
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_nb.cluster.inspection.span_store import SpanStore
from axon_nb.records.spans import Span
from axon_nb.records.training.pipeline import play
from axon_nb.widgets.palette import SPAN_PAINTS
from axon_nb.widgets.timeline.facts import timeline_facts
from axon_nb.widgets.timeline.page import timeline_bundle
from axon_nb.widgets.timeline.record import timeline_file
from axon_nb.widgets.timeline.svg import rank_svg, step_svg
from axon_nb.widgets.timeline.view import TimelineView

MS = 1_000_000


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
def test_hidden_communication_is_what_runs_beside_computing(
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


def test_the_rest_of_a_backward_from_its_last_collective_on_is_not_computing() -> None:
    buckets = [span(0, 10, 30, "collective", group="0"), span(0, 40, 60, "collective", group="0")]
    (own,) = timeline_facts(filled(span(0, 0, 60, "backward"), *buckets).table()).ranks
    assert own.communicating == pytest.approx(0.04)
    assert own.hidden == pytest.approx(0.02)


def late(rank: int, start: float, end: float, sequence: int) -> Span:
    return span(rank, start, end, "collective", name="all_reduce", group="0", bytes=400, sequence=sequence)


def test_the_straggler_is_named() -> None:
    spans = [
        late(rank, 100 * i + (80 if rank == 2 else rank), 100 * i + 90, i + 1) for i in range(5) for rank in range(3)
    ]
    facts = timeline_facts(filled(*spans, ranks=3).table())
    assert facts.straggler.startswith(
        "Straggler: rank 2 came last to 5 of 5 collectives; other ranks waited 0.80 s for it"
    )
    assert facts.num_collectives == 5
    assert [own.bytes for own in facts.ranks] == [2000, 2000, 2000]
    even = [
        late(rank, 100 * i + (80 if rank == i % 3 else 0), 100 * i + 90, i + 1) for i in range(6) for rank in range(3)
    ]
    assert timeline_facts(filled(*even, ranks=3).table()).straggler == ""


def pipeline_spans() -> list[Span]:
    orders = [[("F", r, 0), ("F", r, 1), ("B", r, 0), ("B", r, 1)] for r in range(2)]
    ideal = play(orders, {"F": 0.01, "B": 0.02})
    return [own._replace(group="1", end_ns=own.end_ns - 2 * MS) for own in ideal]


def test_words_and_html_tell_the_same_and_need_no_script() -> None:
    spans = [span(0, 0, 90, "cell", name="In [<3>]"), late(0, 0, 30, 1), late(1, 20, 30, 1), *pipeline_spans()]
    table = filled(*spans).table()
    bundle = timeline_bundle(table, [0, 1, 2], title="In [<3>]")
    words = bundle["text/plain"].splitlines()
    assert words[0] == f"In [<3>]: 3 ranks, 0.09 s, {len(spans)} spans"
    assert "communicating 30 ms" in words[1]
    assert words[3] == "  rank 2: no span"
    assert "pipeline of ranks 0-1, 2 stages, 2 microbatches" in bundle["text/plain"]
    assert "ideal: 90 ms" in bundle["text/plain"] or "ideal: " in bundle["text/plain"]
    html = bundle["text/html"]
    assert "<script" not in html
    assert "In [&lt;3&gt;]" in html
    assert html.count("data:image/svg+xml;base64,") >= 6
    HTMLParser().feed(html)


def test_an_empty_timeline_is_told_too() -> None:
    bundle = timeline_bundle(SpanStore().table(), [0], title="")
    assert bundle["text/plain"].splitlines() == ["Timeline: 1 rank, 0.00 s, 0 spans", "  rank 0: no span"]


def test_pictures_are_valid_and_show_waiting_in_front_of_a_late_collective() -> None:
    table = filled(late(0, 0, 40, 1), late(1, 30, 40, 1), span(0, 0, 40, "forward"), span(0, 0, 40, "wait")).table()
    drawn = rank_svg(table, 0, 0, 40 * MS, num_rows=2)
    ET.fromstring(drawn)
    colors = {paint.kind: paint.color for paint in SPAN_PAINTS}
    assert colors["wait"] in drawn
    assert colors["collective"] in drawn
    assert colors["forward"] not in drawn  # it waits all the time
    step = step_svg(pipeline_spans(), [0, 1], 0.1)
    ET.fromstring(step)
    assert "stroke-dasharray" in step  # the bubble


def test_a_picture_counts_every_part_of_a_unit() -> None:
    table = filled(*(span(0, i / 10, i / 10 + 0.05, "forward") for i in range(10_000))).table()
    drawn = rank_svg(table, 0, 0, 1000 * MS, num_rows=1)
    assert drawn.count("M") == 1  # half of every unit: one box over all


class Page(TimelineView):
    """A view that keeps what it would send, and has a page that confirms it."""

    sent: list[bytes]

    def send(self, content: Any, buffers: Any = None) -> None:
        self.sent.append(bytes(buffers[0]))
        self.on_message({"op": "ack"})


def header_of(message: bytes) -> dict[str, Any]:
    (size,) = struct.unpack_from("<I", message)
    return dict(json.loads(message[8 : 8 + size]))


@pytest.fixture
def feed() -> Any:
    return SimpleNamespace(store=filled(), running_since=None)


@pytest.fixture
def page(feed: Any) -> Any:
    made = Page(feed, [0, 1])
    made.sent = []
    yield made
    made.close()


def test_nothing_is_sent_while_no_page_shows_it(page: Page, feed: Any) -> None:
    feed.store.add([span(0, 0, 1, "forward")])
    page.pump()
    assert page.sent == []
    assert page.wanted  # until a page has been there, as in a notebook that is executed
    assert not page.watched


def test_spans_are_appended_in_small_messages_and_sent_once(page: Page, feed: Any) -> None:
    feed.store.add(span(0, i, i + 1, "forward", name=f"Layer{i % 50}") for i in range(5000))
    page.on_message({"op": "heartbeat"})
    for _ in range(20):
        page.pump()
    headers = [header_of(message) for message in page.sent]
    assert sum(header["count"] for header in headers) == 5000
    assert [header["first"] for header in headers] == [
        sum(h["count"] for h in headers[:i]) for i in range(len(headers))
    ]
    assert max(map(len, page.sent)) <= 50_000
    assert sum(len(header["labels"]) for header in headers) == 50
    before = len(page.sent)
    page.pump()
    assert len(page.sent) == before
    feed.store.add([late(0, 0, 9, 1), late(1, 5, 9, 1)])
    page.pump()
    assert header_of(page.sent[-1])["count"] == 2


def test_what_becomes_known_later_is_sent_as_a_patch(page: Page, feed: Any) -> None:
    page.on_message({"op": "heartbeat"})
    feed.store.add([late(0, 0, 9, 1)])
    page.pump()
    feed.store.add([late(1, 5, 9, 1)])
    page.pump()
    last = header_of(page.sent[-1])
    assert (last["first"], last["count"], last["patched"]) == (1, 1, 1)


def test_a_page_that_has_missed_something_gets_everything(page: Page, feed: Any) -> None:
    page.on_message({"op": "heartbeat"})
    feed.store.add([span(0, 0, 1, "forward")])
    page.pump()
    page.on_message({"op": "resend"})
    page.pump()
    last = header_of(page.sent[-1])
    assert (last["first"], last["count"], last["restart"], len(last["labels"])) == (0, 1, True, 1)


def test_a_page_that_is_loaded_again_has_what_was_there(page: Page, feed: Any) -> None:
    assert page.get_state()["snapshot"] == b""
    feed.store.add(span(0, i, i + 1, "forward") for i in range(100))
    page.on_message({"op": "heartbeat"})
    page.pump()
    snapshot = page.get_state("snapshot")["snapshot"]
    assert header_of(snapshot)["count"] == 100
    assert page.snapshot == b""
    assert page.reopened


def test_a_page_that_is_loaded_again_is_sent_nothing_until_it_can_hear(
    page: Page, feed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("axon_nb.widgets.timeline.view._ACK_TIMEOUT_S", 1e6)
    page.on_message({"op": "heartbeat"})
    feed.store.add([span(0, 0, 1, "forward")])
    page.pump()
    assert header_of(page.get_state("snapshot")["snapshot"])["count"] == 1
    feed.store.add([span(0, 1, 2, "forward")])
    page.pump()
    assert len(page.sent) == 1
    page.on_message({"op": "ready"})
    page.pump()
    assert header_of(page.sent[-1])["first"] == 1


def test_a_page_that_falls_behind_holds_up_what_follows(page: Page, feed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axon_nb.widgets.timeline.view._ACK_TIMEOUT_S", 1e6)
    monkeypatch.setattr(Page, "send", lambda self, content, buffers=None: self.sent.append(bytes(buffers[0])))
    page.on_message({"op": "heartbeat"})
    for i in range(4):
        feed.store.add([span(0, i, i + 1, "forward")])
        page.pump()
    assert len(page.sent) == 2
    number = len(page.sent)
    page.on_message({"op": "ack", "number": header_of(page.sent[-1])["number"]})
    page.pump()
    assert sum(header_of(message)["count"] for message in page.sent) == 4
    assert len(page.sent) <= number + 1


def test_the_saved_page_has_the_spans_and_the_script() -> None:
    store = filled(span(0, 0, 3, "forward", name="</script>"), late(0, 3, 9, 1), late(1, 5, 9, 1))
    html = timeline_file(store.table(), [0, 1])
    assert "const make = widget(" in html
    assert "import {" not in html
    assert html.count("</script>") == 3
    assert "export default" not in html
