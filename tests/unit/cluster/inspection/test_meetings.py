"""Collectives matched from the calls of all ranks, in any order of arrival."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from axon_nb.cluster.inspection.spans import CollectiveMatcher, CollectiveWait
from axon_nb.records.spans import Span


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
