"""The messages that a page of the timeline gets, and pipelines' last steps in them."""

from __future__ import annotations

import json
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from axon_nb.cluster.inspection.spans import SpanStore
from axon_nb.records.spans import Span
from axon_nb.records.training.steps import play
from axon_nb.widgets.timeline.content import page_facts, pipeline_steps, summarize
from axon_nb.widgets.timeline.page import timeline_bundle
from axon_nb.widgets.timeline.view import TimelineView
from tests.unit.widgets.test_timeline import filled, late, span

STEP_NS = 1_000_000_000


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


def test_hidden_view_sends_nothing(page: Page, feed: Any) -> None:
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


def test_later_facts_are_sent_as_a_patch(page: Page, feed: Any) -> None:
    page.on_message({"op": "heartbeat"})
    feed.store.add([late(0, 0, 9, 1)])
    page.pump()
    feed.store.add([late(1, 5, 9, 1)])
    page.pump()
    last = header_of(page.sent[-1])
    assert (last["first"], last["count"], last["patched"]) == (1, 1, 1)


def test_numbers_are_final_when_a_cell_has_ended(page: Page, feed: Any) -> None:
    page.on_message({"op": "heartbeat"})
    feed.running_since = 0
    feed.store.add([span(0, 0, 9, "forward")])
    page.pump()
    feed.store.add([span(0, 9, 18, "forward")])
    page.pump()
    assert "facts" not in header_of(page.sent[-1]), "while a cell runs, they are computed every few seconds"
    feed.running_since = None
    feed.store.add([span(0, 18, 27, "forward"), span(0, 0, 30, "cell", name="In [5]")])
    page.pump()
    assert header_of(page.sent[-1])["cell"] == "In [5]"
    rows = header_of(page.sent[-1])["facts"]["rows"]
    assert rows[0]["cells"][0]["text"] == "27.0 ms"


def test_page_with_gaps_gets_a_full_resend(page: Page, feed: Any) -> None:
    page.on_message({"op": "heartbeat"})
    feed.store.add([span(0, 0, 1, "forward")])
    page.pump()
    page.on_message({"op": "resend"})
    page.pump()
    last = header_of(page.sent[-1])
    assert (last["first"], last["count"], last["restart"], len(last["labels"])) == (0, 1, True, 1)


def test_reloaded_page_gets_all_spans(page: Page, feed: Any) -> None:
    assert page.get_state()["snapshot"] == b""
    feed.store.add(span(0, i, i + 1, "forward") for i in range(100))
    page.on_message({"op": "heartbeat"})
    page.pump()
    snapshot = page.get_state("snapshot")["snapshot"]
    assert header_of(snapshot)["count"] == 100
    assert page.snapshot == b""


def test_finished_view_sends_all_its_spans_again(page: Page, feed: Any) -> None:
    feed.store.add(span(0, i, i + 1, "forward") for i in range(100))
    page.on_message({"op": "heartbeat"})
    page.finish()
    feed.store.add([span(0, 200, 201, "forward")])  # of a later cell
    page.on_message({"op": "resend"})
    last = header_of(page.sent[-1])
    assert (last["first"], last["count"], last["restart"], last["finished"]) == (0, 100, True, True)
    assert header_of(page.get_state("snapshot")["snapshot"])["count"] == 100


def test_reloaded_page_gets_nothing_until_ready(page: Page, feed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_slow_page_delays_further_messages(page: Page, feed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_view_of_a_cell_begins_at_the_cell(feed: Any) -> None:
    feed.store.add([span(0, 0, 5, "cell", name="In [1]"), span(1, 0, 5, "cell", name="In [1]")])
    feed.running_since = 5_000_000  # as the feed may still have it of an earlier cell
    made = Page(feed, [0, 1], begin=feed.store.end, since_ns=30_000_000)
    made.sent = []
    made.on_message({"op": "heartbeat"})
    feed.store.add([span(0, 31, 32, "forward")])
    made.pump()
    origin = made._origin_ns
    assert header_of(made.sent[-1])["focus"] == [(30_000_000 - origin) / 1e9, None]
    feed.store.add([span(0, 30, 40, "cell", name="In [2]")])
    made.finish()
    start, end = header_of(made.sent[-1])["focus"]
    assert end - start == pytest.approx(0.01)
    made.close()


def gpipe(num_ranks: int, num_microbatches: int, *, group: str, start_ns: int, first_rank: int = 0) -> list[list[Span]]:
    """One step; a list for each rank."""
    numbers, ranks = range(num_microbatches), range(first_rank, first_rank + num_ranks)
    orders = [[(action, r, m) for action in "FB" for m in numbers] for r in range(num_ranks)]
    spans = [
        own._replace(start_ns=own.start_ns + start_ns, end_ns=own.end_ns + start_ns, group=group, sequence=start_ns + 1)
        for own in play(orders, {"F": 1e-4, "B": 1e-4}, ranks=list(ranks))
    ]
    return [[span for span in spans if span.rank == rank] for rank in ranks]


def test_newest_of_many_pipelines_are_shown() -> None:
    store = SpanStore()
    for number in range(1, 41):
        store.set_groups({str(number): [0, 1]})
        for own in gpipe(2, 4, group=str(number), start_ns=number * STEP_NS):
            store.add(own)
    store.set_groups({"0": range(4)})
    for own in gpipe(4, 4, group="0", start_ns=50 * STEP_NS):
        store.add(own)
    found = pipeline_steps(store.table())
    assert [step.group for step in found] == ["0", *(str(number) for number in range(40, 0, -1))]
    words = timeline_bundle(store.table(), range(4), title="")["text/plain"]
    assert "pipeline of ranks 0-3, 4 stages, 4 microbatches" in words
    assert "37 older pipelines are left out." in words


def test_ranks_replying_in_turn_are_all_analysed() -> None:
    store = SpanStore()
    store.set_groups({"0": range(4), "1": range(4)})
    by_rank: list[list[Span]] = [[], [], [], []]
    for number in range(100):
        for rank, own in enumerate(gpipe(4, 16, group="0", start_ns=number * STEP_NS)):
            by_rank[rank] += own
    for rank, own in enumerate(gpipe(4, 400, group="1", start_ns=200 * STEP_NS)):
        by_rank[rank] += own
    for own in by_rank:
        store.add(own[7:])
    found = {step.group: step for step in pipeline_steps(store.table())}
    assert min(span.start_ns for span in found["0"].measured) == 99 * STEP_NS
    assert len(found["1"].measured) == 4 * 2 * 400  # more than are looked at first


def test_facts_of_large_pipelines_fit_into_one_message() -> None:
    store = SpanStore()
    for number in range(4):
        store.set_groups({str(number): range(16)})
        for own in gpipe(16, 64, group=str(number), start_ns=number * STEP_NS):
            store.add(own)
    facts = page_facts(summarize(store.table()), range(16))
    assert len(json.dumps(facts, separators=(",", ":"))) < 45_000
    assert [step["omitted"] for step in facts["pipelines"]] == [16 * 64 * 2 - 125] * 4
    shown = facts["pipelines"][0]["rows"][0]["boxes"]
    assert [box[1] for box in shown] == sorted(box[1] for box in shown)
