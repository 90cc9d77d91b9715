"""The steps of ranks over shared memory, recorded from the real code with a group that never waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from axon_nb.comm.errors import CollectiveMismatchError, TensorMismatchError
from axon_nb.comm.shared_memory.collectives import algorithms, rounds
from axon_nb.comm.shared_memory.segment.memory import SLOTS

N = 3
PART = 64
SLOT = N * PART
UNIT = 1 << 40
Step = tuple[Any, ...]
Part = tuple[int, int, int]
"""Rank, slot, third of the slot."""
Tag = tuple[int, int]
"""Collective and piece."""


class Recorder:
    """Stands in for `Progress` and its memory: writes down what a rank does, and never waits."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size, self.members = rank, N, list(range(N))
        self.memory = self.layout = self
        self.slot_bytes = self.chunk_bytes = SLOT
        self.bytes, self.address = None, 0
        self.steps: list[Step] = []
        self.sequence = 0

    def raise_if_left(self) -> None:
        self.steps.append(("check",))

    def announce(self, sequence: int, fact: int, line: int) -> None:
        self.sequence = sequence
        self.steps.append(("announce", sequence, fact))

    def name_place(self, sequence: int, place: str) -> None: ...

    def place_of(self, rank: int, sequence: int) -> str:
        return "barrier"

    def post(self, value: int) -> None:
        self.steps.append(("post", value))

    def wait_for_all(self, target: int, limit: float, check: Any = None) -> None:
        others = tuple(peer for peer in range(N) if peer != self.rank)
        self.steps.append(("wait", others, target) if check is None else ("meet", others, target, self.sequence))

    def wait_for(self, peer: int, target: int, limit: float) -> None:
        self.steps.append(("wait", (peer,), target))

    def call_of(self, rank: int, sequence: int) -> tuple[int, int]:
        return 0, 0

    def same_call(self, sequence: int, fact: int) -> bool:
        return True

    def parts(self, address: int, size: int) -> Iterator[tuple[Part, int]]:
        """The parts at an address that `RecordedRounds.slot` made, and their piece; none at other addresses."""
        if size <= 0 or address < UNIT * 1000:
            return
        place, offset = divmod(address, UNIT)
        (rank, slot), piece = divmod(place // 1000, SLOTS), place % 1000
        for third in range(offset // PART, -(-(offset + size) // PART)):
            yield (rank, slot, third), piece

    def copy(self, target: int, source: int, size: int) -> None:
        self.writes(target, size)
        self.reads(source, size)

    def writes(self, address: int, size: int) -> None:
        for part, piece in self.parts(address, size):
            self.merge("write", (part, (self.sequence, piece)))

    def reads(self, address: int, size: int) -> None:
        for part, piece in self.parts(address, size):
            if part[0] - N != self.rank:
                self.merge("read", (part, (self.sequence, piece)))

    def merge(self, kind: str, item: tuple[Part, Tag]) -> None:
        """What happens without a post or a wait in between is one step that takes time."""
        if self.steps and self.steps[-1][0] == kind:
            self.steps[-1] = (kind, (*self.steps[-1][1], item))
        else:
            self.steps.append((kind, (item,)))

    def reduce(self, target: Any, sources: list[tuple[Any, int]], count: int) -> None:
        for _, address in sources:
            self.reads(address, count * 4)
        self.writes(target[1], count * 4)


class RecordedRounds(rounds.Rounds):
    """`slot` also says which piece is meant."""

    def slot(self, rank: int, piece: int) -> int:
        return ((rank * SLOTS + (self._first_slot + piece) % SLOTS + SLOTS * N) * 1000 + piece) * UNIT


def all_reduce(r: Any, recorder: Recorder, pieces: int) -> None:
    algorithms.all_reduce(r, 0, target=None, count=pieces * SLOT // 4, item=4, sums=recorder)  # type: ignore[arg-type]


def small_all_reduce(r: Any, recorder: Recorder, pieces: int) -> None:
    algorithms.all_reduce_small(r, 0, size=SLOT, count=SLOT // 4, sums=recorder, scratch=(None, 0))  # type: ignore[arg-type]


def all_gather(r: Any, recorder: Recorder, pieces: int) -> None:
    algorithms.all_gather(r, 0, pieces * SLOT, [0] * N)


def broadcast(r: Any, recorder: Recorder, pieces: int) -> None:
    algorithms.broadcast(r, 0, pieces * SLOT, 1)


def scatter(r: Any, recorder: Recorder, pieces: int) -> None:
    algorithms.scatter(r, [0] * N if r.rank == 2 else None, pieces * PART, 0, 2)


def gather(r: Any, recorder: Recorder, pieces: int) -> None:
    algorithms.gather(r, 0, pieces * SLOT, [0] * N if r.rank == 0 else None, 0)


def reduce(r: Any, recorder: Recorder, pieces: int) -> None:
    algorithms.reduce(r, 0, buffer=None, count=pieces * SLOT // 4, item=4, sums=recorder, root=1)  # type: ignore[arg-type]


def reduce_scatter(r: Any, recorder: Recorder, pieces: int) -> None:
    algorithms.reduce_scatter(r, [0] * N, own_part=b"1", buffer=None, count=pieces * PART // 4, item=4, sums=recorder)  # type: ignore[arg-type]


SENT = [[PART * (1 + (source + 2 * target) % 3) for target in range(N)] for source in range(N)]
"""Bytes from each rank to each in an all_to_all: one to three pieces."""


class Tables:
    """Stands in for NumPy in `movement`: records that tables of sizes are written to slots and read from them."""

    int64, stack, argwhere = np.int64, staticmethod(np.stack), staticmethod(np.argwhere)

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._last_written = 0
        self.differ = False
        """Whether rank 1 expects other sizes than it gets."""

    def frombuffer(self, buffer: None, dtype: Any, count: int, address: int) -> Any:
        ((rank, _, _), _) = next(self._recorder.parts(address, 1))
        rank -= N
        sizes = [SENT[rank], [SENT[source][rank] + (self.differ and rank == 1) for source in range(N)]]
        if rank != self._recorder.rank:
            self._recorder.reads(address, count * 8)
        elif self._last_written < self._recorder.sequence:
            self._recorder.writes(address, count * 8)
            self._last_written = self._recorder.sequence
        return np.array(sizes).reshape(-1)


def all_to_all(r: Any, recorder: Recorder, pieces: int) -> None:
    """Without pieces, the sizes differ between ranks, which all ranks notice."""
    own, nowhere = r.rank, [0] * N
    algorithms.np.differ = not pieces  # type: ignore[attr-defined]
    taken = [SENT[source][own] for source in range(N)]
    with nullcontext() if pieces else pytest.raises(TensorMismatchError):
        algorithms.all_to_all(r, nowhere, SENT[own], nowhere, taken)


Call = tuple[Callable[[Any, Recorder, int], None], int]


def record(calls: list[Call | None], rank: int, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps of one rank; None: a call that does not fit what another rank calls there."""
    recorder = Recorder(rank)
    for module in (algorithms, algorithms):
        monkeypatch.setattr(module, "copy", recorder.copy)
    if any(call and call[0] is all_to_all for call in calls):
        recorder.slot_bytes = recorder.chunk_bytes = PART + SLOT  # behind a table
        monkeypatch.setattr(algorithms, "np", Tables(recorder))
    group = RecordedRounds(recorder, 1.0)  # type: ignore[arg-type]
    for number, call in enumerate(calls):
        if call is None:
            group.begin(99 + rank % 2, 0)
            group.post(1)
            recorder.same_call = lambda sequence, fact: False  # type: ignore[method-assign]
            recorder.call_of = lambda peer, sequence: (99 + peer % 2, 0)  # type: ignore[method-assign]
            with pytest.raises(CollectiveMismatchError):
                group.wait_for_peers()
            recorder.same_call = lambda sequence, fact: True  # type: ignore[method-assign]
            continue
        group.begin(number + 1, 0)
        call[0](group, recorder, call[1])
    return recorder.steps


SEQUENCES: dict[str, list[Call | None]] = {
    "small sums": [(small_all_reduce, 1)] * 6,
    "large sums": [(all_reduce, 1), (all_reduce, 3)],
    "a large sum after small ones": [(small_all_reduce, 1), (all_gather, 1), (all_reduce, 5)],
    "gathers": [(all_gather, 3), (small_all_reduce, 1), (all_gather, 6)],
    "from and to one rank": [(broadcast, 5), (scatter, 2), (gather, 3), (reduce, 2)],
    "many broadcasts": [(broadcast, 1)] * 6 + [(broadcast, 6)],
    "reduce_scatter": [(reduce_scatter, 3), (all_reduce, 2), (reduce_scatter, 1)],
    "calls that differ": [(small_all_reduce, 1), None, None, (all_reduce, 2), None, (all_gather, 2)],
    "all_to_all": [(all_to_all, 3), (broadcast, 2), (all_to_all, 3)],
    "all_to_all of sizes that differ": [(all_to_all, 0), (all_gather, 1), (all_to_all, 0), (all_gather, 5)],
    "ten calls that differ": [None] * 10 + [(small_all_reduce, 1)],
}
