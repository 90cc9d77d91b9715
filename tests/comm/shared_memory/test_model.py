"""No order of steps, deaths and aborts makes ranks wait for ever or read what is not theirs; fences keep the order.

What each of three ranks does is recorded from the real code, with a group that never waits. A rank's slots hold what
its place in that list says, for it alone writes them; so a state is the ranks' places, and whether they are gone.

No processor here reorders accesses, so the fences are checked in the code that runs on aarch64. If they hold, whatever
a processor reorders between two of them looks like one of the orders that are tried.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axon_nb.comm.shared_memory.collectives import algorithms, rounds
from axon_nb.comm.shared_memory.group import SharedMemoryGroup
from axon_nb.comm.shared_memory.segment import futex, memory
from axon_nb.comm.shared_memory.segment.memory import InRing, Layout, OutRing, SharedMemory
from axon_nb.comm.shared_memory.segment.progress import Progress
from tests.comm.shared_memory.recorded_steps import SEQUENCES, N, Part, Step, Tag, all_gather, record

RUNNING, DONE, LEFT, DEAD = range(4)


@dataclasses.dataclass(frozen=True)
class State:
    """Where the ranks are; a write or read that has begun is at its step with `amid` set."""

    places: tuple[int, ...]
    amid: tuple[bool, ...]
    kinds: tuple[int, ...]
    faults: int


class Model:
    """All states that three ranks can reach.

    Args:
        programs: The steps of each rank.
        faults: How many deaths and aborts there may be.
    """

    def __init__(self, programs: list[list[Step]], faults: int) -> None:
        self.programs = programs
        self.start = State((0,) * N, (False,) * N, (RUNNING,) * N, faults)
        self.posted: list[list[int]] = []
        self.contents: list[list[dict[Part, Tag]]] = []
        self.announced: list[list[dict[int, int]]] = []
        for steps in programs:
            posted, contents, announced = [0], [{}], [{}]
            for step in steps:
                posted.append(step[1] if step[0] == "post" else posted[-1])
                contents.append({**contents[-1], **dict(step[1])} if step[0] == "write" else contents[-1])
                # Of eight announcements the oldest is overwritten.
                new = {**announced[-1], step[1]: step[2]} if step[0] == "announce" else announced[-1]
                announced.append({number: fact for number, fact in new.items() if number > max(new, default=0) - 8})
            self.posted.append(posted)
            self.contents.append(contents)
            self.announced.append(announced)

    def explore(self) -> tuple[int, set[tuple[int, ...]]]:
        """Number of states, and how the ranks can end."""
        seen, stack, ends = {self.start}, [self.start], set()
        while stack:
            state = stack.pop()
            following = list(self.moves(state))
            if not following:
                assert RUNNING not in state.kinds, f"waits for ever: {self.describe(state)}"
                ends.add(state.kinds)
            following += self.misfortunes(state)
            for other in following:
                if other not in seen:
                    seen.add(other)
                    stack.append(other)
        return len(seen), ends

    def describe(self, state: State) -> list[Any]:
        return [
            (state.kinds[rank], self.programs[rank][place] if place < len(self.programs[rank]) else "end")
            for rank, place in enumerate(state.places)
        ]

    def misfortunes(self, state: State) -> list[State]:
        """A rank dies or leaves, wherever it is."""
        if not state.faults:
            return []
        return [
            dataclasses.replace(state, kinds=_put(state.kinds, rank, kind), faults=state.faults - 1)
            for rank in range(N)
            if state.kinds[rank] == RUNNING
            for kind in (LEFT, DEAD)
        ]

    def moves(self, state: State) -> Iterator[State]:
        for rank in range(N):
            if state.kinds[rank] == RUNNING:
                yield from self.moves_of(state, rank)

    def moves_of(self, state: State, rank: int) -> Iterator[State]:
        place, steps = state.places[rank], self.programs[rank]
        if place == len(steps):
            yield dataclasses.replace(state, kinds=_put(state.kinds, rank, DONE))
            return
        step = steps[place]
        onward = dataclasses.replace(
            state, places=_put(state.places, rank, place + 1), amid=_put(state.amid, rank, False)
        )
        leaves = dataclasses.replace(state, kinds=_put(state.kinds, rank, LEFT))
        if step[0] in ("write", "read"):
            if state.amid[rank]:
                yield onward
                return
            self.check_overlap(state, rank, step)
            yield dataclasses.replace(state, amid=_put(state.amid, rank, True))
        elif step[0] in ("wait", "meet"):
            if all(self.posted[peer][state.places[peer]] >= step[2] for peer in step[1]):
                if step[0] == "meet":
                    self.check_announcements(state, step)
                yield onward
            elif step[0] == "meet" and self.differs(state, rank, step[3]):
                yield onward  # said at once, before all have come
            elif any(kind == LEFT for kind in state.kinds) or any(state.kinds[peer] == DEAD for peer in step[1]):
                yield leaves
        elif step[0] == "check" and any(kind == LEFT for kind in state.kinds):
            yield leaves
        else:
            yield onward

    def differs(self, state: State, rank: int, sequence: int) -> bool:
        own = self.announced[rank][state.places[rank]][sequence]
        return any(
            self.announced[peer][state.places[peer]].get(sequence, own) != own for peer in range(N) if peer != rank
        )

    def check_announcements(self, state: State, step: Step) -> None:
        """Whoever meets can read what all have announced."""
        assert all(step[3] in self.announced[rank][state.places[rank]] for rank in range(N)), self.describe(state)

    def check_overlap(self, state: State, rank: int, step: Step) -> None:
        """Nobody writes what is being read, and who reads finds what he expects."""
        if step[0] == "read":
            for part, tag in step[1]:
                owner = part[0] - N  # see `RecordedRounds.slot`
                assert self.contents[owner][state.places[owner]].get(part) == tag, (part, tag, self.describe(state))
                busy = self.programs[owner][state.places[owner]] if state.amid[owner] else ("", ())
                assert busy[0] != "write" or part not in dict(busy[1]), self.describe(state)
            return
        parts = dict(step[1])
        for peer in range(N):
            if peer != rank and state.amid[peer] and state.kinds[peer] == RUNNING:
                other = self.programs[peer][state.places[peer]]
                assert other[0] != "read" or not parts.keys() & dict(other[1]).keys(), self.describe(state)


def _put(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


@pytest.mark.parametrize("name", SEQUENCES)
def test_every_interleaving_with_one_fault_terminates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [record(SEQUENCES[name], rank, monkeypatch) for rank in range(N)]
    states, ends = Model(programs, faults=1).explore()
    assert states > 1000
    assert (DONE,) * N in ends
    # A death ends every rank that needs the dead one; the others are through already.
    assert any(DEAD in kinds and LEFT in kinds for kinds in ends)


@pytest.mark.parametrize("name", ["small sums", "large sums"])
def test_every_interleaving_with_two_faults_terminates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [record(SEQUENCES[name][:4], rank, monkeypatch) for rank in range(N)]
    _, ends = Model(programs, faults=2).explore()
    assert (DONE,) * N in ends


def test_model_detects_too_few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "SLOTS", 2)
    monkeypatch.setattr("tests.comm.shared_memory.recorded_steps.SLOTS", 2)
    programs = [record([(all_gather, 5)], rank, monkeypatch) for rank in range(N)]
    with pytest.raises(AssertionError):
        Model(programs, faults=0).explore()


class Words:
    """Words of shared memory that record when they are read."""

    def __init__(self, words: Any, events: list[str]) -> None:
        self._words, self._events = words, events

    def __getitem__(self, place: int) -> int:
        value: int = self._words[place]
        self._events.append(f"read {value}")
        return value

    def __setitem__(self, place: int, value: int) -> None:
        self._words[place] = value


def refusal(ranks: list[Progress], words: Words) -> None:
    InRing(ranks[1].memory, 0, 1).refuse(111, 222, 333)
    ring = OutRing(ranks[0].memory, 0, 1)
    ring._words = words  # type: ignore[assignment]
    assert ring.refused() == (111, 222, 333)


def reason(ranks: list[Progress], words: Words) -> None:
    ranks[1].words[ranks[1].own_place + 13] = 0
    ranks[1].leave("x" * 222)
    ranks[0].words = words  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="x" * 222):
        ranks[0].raise_if_left()


def readiness(ranks: list[Progress], words: Words) -> None:
    ranks[0].words = words  # type: ignore[assignment]
    ranks[0].wait_until_ready(time.monotonic() + 60)
    assert ranks[0].words[ranks[1].own_place] == 0


READS: dict[str, tuple[Callable[[list[Progress], Words], None], list[str]]] = {
    "refusal": (refusal, ["read 111", "fence", "read 222", "read 333"]),
    "reason": (reason, ["read 1", "fence", "read 222"]),
    "readiness": (readiness, ["read 1", "fence", f"read {os.getpid()}", "read 0"]),
}


@pytest.mark.parametrize("name", READS)
def test_fence_separates_publishing_word_from_data(name: str, monkeypatch: Any) -> None:
    layout = Layout.of(2, 1 << 20)
    descriptor = SharedMemory.create(layout)
    ranks = [Progress(SharedMemory(descriptor, layout), rank, [0, 1], None) for rank in range(2)]
    os.close(descriptor)
    events: list[str] = []
    read, expected = READS[name]
    monkeypatch.setattr(futex, "NEEDS_FENCE", True)
    monkeypatch.setattr(futex, "fence", lambda: events.append("fence"))
    words = Words(ranks[0].words, events)
    read(ranks, words)
    assert events[events.index(expected[0]) :] == expected  # before are the fences of the rank that writes


class FencedRank:
    """Checks the order in which the calling thread of one rank accesses the memory of its group."""

    def __init__(self, group: SharedMemoryGroup) -> None:
        self.group, self._memory = group, group.progress.memory
        self._thread = threading.get_ident()
        self._words, self._layout = self._memory.words, self._memory.layout
        self._unfenced: dict[str, str] = {}
        self.num_fences = self.num_copies = 0
        self.problems: list[str] = []
        group.progress.words = self  # type: ignore[assignment]
        for ring in (*group._messages._out, *group._messages._in):
            ring._words = self  # type: ignore[assignment]

    def __getitem__(self, place: int | slice) -> Any:
        if threading.get_ident() != self._thread:
            return self._words[place]
        if isinstance(place, slice):  # the head of a piece
            self._data("a head")
        elif self._publishes(place) and not self._is_own(place):
            self._unfenced["read"] = f"word {place}"
        return self._words[place]

    def __setitem__(self, place: int, value: int) -> None:
        if threading.get_ident() != self._thread:
            pass
        elif self._publishes(place):
            if access := self._unfenced.get("data"):
                self.problems.append(f"no fence between {access} and the write of word {place}")
        elif place * 8 >= self._layout.heads(0, 0):
            self._data("a head")
        self._words[place] = value

    def _publishes(self, place: int) -> bool:
        """Whether it is a progress word or a counter of pieces."""
        at, size = place * 8, self._layout.size
        return at % 4096 == 0 if at < self._layout.control(size) else at < self._layout.slot(0, 0) and at % 64 == 0

    def _is_own(self, place: int) -> bool:
        at, rank, size = place * 8, self.group.rank(), self._layout.size
        if at < self._layout.control(size):
            return at == self._layout.control(rank)
        return self._layout.sent(rank, 0) <= at < self._layout.sent(rank + 1, 0)

    def _data(self, what: str) -> None:
        self.num_copies += 1
        if word := self._unfenced.get("read"):
            self.problems.append(f"no fence between the read of {word} and the access to {what}")
        self._unfenced["data"] = what

    def copy(self, target: int, source: int, size: int) -> None:
        for address in (target, source):
            if size and 0 <= address - self._memory.address < self._layout.total:
                self._data(f"{size} bytes at {address - self._memory.address}")

    def fence(self) -> None:
        self.num_fences += 1
        self._unfenced.clear()


def all_calls(group: SharedMemoryGroup) -> torch.Tensor:
    """Each operation with small tensors and with tensors of several pieces; return the sums."""
    rank, n = group.rank(), group.size()
    total = torch.zeros(1)
    for count in (4, 3 << 18):
        own = torch.arange(count, dtype=torch.float32) + rank
        group.allreduce([summed := own.clone()]).wait()
        group.broadcast([copied := own.clone()]).wait()
        group._allgather_base(whole := torch.zeros(n * count), own).wait()
        group._reduce_scatter_base(part := torch.zeros(count), whole).wait()
        group.alltoall_base(swapped := torch.zeros(count), own, [], []).wait()
        group.reduce([own.clone()]).wait()
        received = torch.zeros(count)
        works = [group.send([own], 1 - rank, 3), group.recv([received], 1 - rank, 3)]
        for work in works:
            work.wait()
        total += sum(tensor.double().sum() for tensor in (summed, copied, whole, part, swapped, received)).float()
    group.barrier().wait()
    return total


def test_all_calls_have_fences_between_data_and_words(monkeypatch: Any) -> None:
    store, size = dist.HashStore(), 2
    monkeypatch.setattr(futex, "NEEDS_FENCE", True)
    ranks: list[FencedRank | None] = [None] * size
    results: list[Any] = [None] * size
    current, real_copy, real_fence = threading.local(), futex.copy, futex.fence

    def copy(target: int, source: int, count: int) -> None:
        if (rank := getattr(current, "rank", None)) is not None:
            rank.copy(target, source, count)
        real_copy(target, source, count)

    def fence() -> None:
        if (rank := getattr(current, "rank", None)) is not None:
            rank.fence()
        real_fence()

    for module in (algorithms, algorithms, algorithms, memory, futex):
        monkeypatch.setattr(module, "copy", copy)
    monkeypatch.setattr(futex, "fence", fence)

    def serve(number: int) -> None:
        group = SharedMemoryGroup(
            store, rank=number, size=size, timeout=timedelta(seconds=60), name="fences", max_bytes=4 << 20
        )
        current.rank = ranks[number] = FencedRank(group)
        results[number] = all_calls(group)
        group.shutdown()

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] is not None
    for rank in ranks:
        assert rank is not None
        assert not rank.problems
        assert rank.num_copies > 50
        assert rank.num_fences > 50


def test_missing_fence_is_detected(monkeypatch: Any) -> None:
    def wait_without_fence(self: Progress, target: int, deadline: float, check: Any = None) -> None:
        for _, place in self.others:
            while self.words[place] < target:
                time.sleep(0.0001)

    monkeypatch.setattr(Progress, "wait_for_all", wait_without_fence)
    with pytest.raises(AssertionError, match="no fence between the read of word"):
        test_all_calls_have_fences_between_data_and_words(monkeypatch)
