"""The notebook's spans: numbered, bounded, reported once, and matched between ranks in any order of arrival."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_nb.cluster.inspection.feeds import cell_window
from axon_nb.cluster.inspection.spans import CollectiveMatcher, CollectiveWait, SpanStore
from axon_nb.errors import UsageError
from axon_nb.records.spans import Span


def span(rank: int, start: int, end: int, kind: str = "forward", **more: object) -> Span:
    name = str(more.pop("name", kind))
    return Span(rank, kind, name, start, end)._replace(**more)


def test_oldest_spans_are_dropped_and_counted() -> None:
    store = SpanStore(limit=100)
    for start in range(0, 1000, 50):
        store.add([span(0, start + i, start + i + 1) for i in range(50)])
    assert store.end == 1000
    assert 100 <= store.end - store.first <= 120
    table = store.table()
    assert (table.first, len(table)) == (store.first, store.end - store.first)
    assert table.columns["start"].tolist() == list(range(store.first, 1000))
    assert store.table(990, 995).columns["start"].tolist() == [990, 991, 992, 993, 994]
    assert len(store.table(2000)) == 0
    assert store.table(0, 10).first == store.first  # they are gone


def test_oversized_batch_keeps_its_newest_spans() -> None:
    store = SpanStore(limit=50)
    store.add([span(0, i, i + 1) for i in range(1000)], lost=3)
    assert store.table().columns["start"].tolist()[-50:] == list(range(950, 1000))
    assert store.lost == 3


def test_spans_are_aligned_to_the_notebook_clock() -> None:
    store = SpanStore()
    store.add([span(1, 5, 9)], offset_ns=100)
    assert [(own.start_ns, own.end_ns) for own in store.table().spans()] == [(105, 109)]


def test_lateness_is_known_once_all_ranks_reported() -> None:
    store = SpanStore()
    store.set_groups({"0": [0, 1]})
    calls = [span(rank, 10 * rank, 50, "collective", group="0", sequence=1, bytes=8) for rank in (0, 1)]
    store.add([calls[0]])
    assert store.patches(0) == ([], 0)
    store.add([calls[1]])
    assert store.patches(0) == ([(0, 10, 1), (1, 0, 1)], 2)
    assert store.patches(2) == ([], 2)
    frame = store.table().to_frame()
    assert frame["waited_for"].tolist() == [1, 1]
    assert frame["waited_s"].tolist() == [10e-9, 0.0]
    assert frame["stage"].isna().all()


def test_pipeline_message_wait_and_transfer_times_are_matched() -> None:
    store = SpanStore()
    message = span(0, 20, 30, "p2p", name="recv", group="1", bytes=8)
    waited = span(0, 25, 30, "p2p", name="RECV_F", group="1", bytes=8, stage=1, microbatch=2)
    store.add([message, waited])
    assert [(own.kind, own.name, own.stage) for own in store.table().spans()] == [
        ("p2p", "recv", -1),
        ("wait", "RECV_F", 1),
    ]


def test_last_cell_covers_all_its_ranks() -> None:
    store = SpanStore()
    store.add([span(0, 0, 5, "cell", name="In [3]"), span(0, 100, 150, "cell", name="In [4]")])
    store.add([span(1, 90, 155, "cell", name="In [4]"), span(1, 2, 6, "cell", name="In [3]")])
    assert store.last_cell == ("In [4]", 90, 155)
    assert cell_window(store.table(), 4) == (90, 155)
    with pytest.raises(UsageError, match=r"no spans of In \[7\]; the last cells that they ran: In \[3\], In \[4\]"):
        cell_window(store.table(), 7)


def test_spans_are_added_and_read_concurrently() -> None:
    store = SpanStore(limit=2000)

    def work(rank: int) -> None:
        for i in range(100):
            store.add([span(rank, i, i + 1) for _ in range(10)])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        table = store.table()
        assert len(table.columns["rank"]) == len(table)
    assert store.end == 4000


def test_spans_after_a_time_start_with_the_first_to_end_after_it() -> None:
    store = SpanStore(limit=100)
    store.add([span(0, i, i + 1) for i in range(150)])
    found = store.ending_after(140)
    assert (found.first, found.columns["start"].tolist()) == (140, list(range(140, 150)))
    assert store.ending_after(0).first == store.first
    assert store.ending_after(140, 145).first == 145
    assert len(store.ending_after(1000)) == 0


def call(rank: int, start: int, end: int, sequence: int = 1, name: str = "all_reduce") -> Span:
    return Span(rank, "collective", name, start, end, "0", 64, -1, -1, sequence)


def known(num_ranks: int) -> CollectiveMatcher:
    meetings = CollectiveMatcher()
    meetings.set_members("0", tuple(range(num_ranks)))
    return meetings


@given(st.permutations(range(12)), st.lists(st.integers(0, 1000), min_size=12, max_size=12))
def test_ranks_wait_for_the_last_arrival(order: list[int], starts: list[int]) -> None:
    meetings, found = known(4), []
    calls = [call(i % 4, starts[i] + 10_000 * (i // 4), 10_000 * (i // 4) + 2000, 1 + i // 4) for i in range(12)]
    for number in order:
        found += meetings.add(number, calls[number])
    assert len(found) == 12
    for late in found:
        same = [calls[i] for i in range(12) if calls[i].sequence == calls[late.number].sequence]
        last = max(same, key=lambda own: own.start_ns)
        assert late.waited_ns == last.start_ns - calls[late.number].start_ns
        assert (
            calls[late.number].start_ns + late.waited_ns == next(s for s in same if s.rank == late.last_rank).start_ns
        )


def test_broadcast_source_waits_only_during_its_call() -> None:
    meetings = known(2)
    assert meetings.add(0, call(0, 0, 10, name="broadcast")) == []
    assert meetings.add(1, call(1, 500, 520, name="broadcast")) == [CollectiveWait(0, 10, 1), CollectiveWait(1, 0, 1)]


def test_unmatched_calls_are_ignored() -> None:
    meetings = known(2)
    assert meetings.add(0, call(0, 0, 9, sequence=0)) == []
    assert meetings.add(1, call(1, 0, 9, sequence=0)) == []
    assert meetings.add(2, call(5, 0, 9)) == []
    assert meetings.add(3, call(0, 0, 9)._replace(group="unknown")) == []


def test_rebuilt_group_restarts_its_numbering() -> None:
    meetings = known(2)
    meetings.add(0, call(0, 0, 9))  # rank 1 never came: the cell was ended
    meetings.add(1, call(0, 100, 130))
    assert meetings.add(2, call(1, 120, 130)) == [CollectiveWait(1, 20, 1), CollectiveWait(2, 0, 1)]
