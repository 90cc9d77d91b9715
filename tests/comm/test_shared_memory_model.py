"""No order of steps, deaths and aborts makes ranks wait for ever or read what is not theirs: every order is tried.

What each of three ranks does is recorded from the real code, with a group that never waits. A rank's slots hold what
its place in that list says, for it alone writes them; so a state is the ranks' places, and whether they are gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from axon_nb.comm.errors import CollectiveMismatchError
from axon_nb.comm.shared_memory.collectives import movement, reduction, rounds
from axon_nb.comm.shared_memory.memory import SLOTS

N = 3
PART = 64
SLOT = N * PART
UNIT = 1 << 40
RUNNING, DONE, LEFT, DEAD = range(4)
Step = tuple[Any, ...]
Part = tuple[int, int, int]
"""Rank, slot, third of the slot."""
Tag = tuple[int, int, int]
"""Collective, piece, and how often this part of it has been written."""


class Recorder:
    """Stands in for `Progress` and its memory: writes down what a rank does, and never waits."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size, self.members = rank, N, list(range(N))
        self.memory = self.layout = self
        self.slot_bytes, self.bytes, self.address = SLOT, None, 0
        self.steps: list[Step] = []
        self.sequence = 0
        self.written: dict[tuple[int, int, Part], int] = {}

    def raise_if_left(self) -> None:
        self.steps.append(("check",))

    def announce(self, sequence: int, fact: int, line: int) -> None:
        self.sequence = sequence
        self.steps.append(("announce", sequence, fact))

    def post(self, value: int) -> None:
        self.steps.append(("post", value))

    def wait_for_all(self, target: int, limit: float, check: Any = None) -> None:
        others = tuple(peer for peer in range(N) if peer != self.rank)
        self.steps.append(("wait", others, target) if check is None else ("meet", others, target, self.sequence))

    def wait_for(self, peer: int, target: int, limit: float) -> None:
        self.steps.append(("wait", (peer,), target))

    def same_call(self, sequence: int, fact: int) -> bool:
        return True

    def parts(self, address: int, size: int) -> Iterator[tuple[Part, int]]:
        """The parts at an address that `RecordedRounds.slot` made, and their piece."""
        place, offset = divmod(address, UNIT)
        (rank, slot), piece = divmod(place // 1000, SLOTS), place % 1000
        for third in range(offset // PART, -(-(offset + size) // PART)):
            yield (rank, slot, third), piece

    def copy(self, target: int, source: int, size: int) -> None:
        if size > 0 and target >= UNIT * 1000:
            self.writes(target, size)
        if size > 0 and source >= UNIT * 1000:
            self.reads(source, size, again=self.name == "all_reduce")

    name = ""

    def writes(self, address: int, size: int) -> None:
        for part, piece in self.parts(address, size):
            key = (self.sequence, piece, part)
            self.written[key] = self.written.get(key, 0) + 1
            self.merge("write", (part, (self.sequence, piece, self.written[key])))

    def reads(self, address: int, size: int, *, again: bool = False) -> None:
        for part, piece in self.parts(address, size):
            self.merge("read", (part, (self.sequence, piece, 2 if again else 1)))

    def merge(self, kind: str, item: tuple[Part, Tag]) -> None:
        """What happens without a post or a wait in between is one step that takes time."""
        if self.steps and self.steps[-1][0] == kind:
            self.steps[-1] = (kind, (*self.steps[-1][1], item))
        else:
            self.steps.append((kind, (item,)))

    def reduce(self, target: Any, sources: list[tuple[Any, int]], count: int) -> None:
        for _, address in sources:
            self.reads(address, count * 4)


class RecordedRounds(rounds.Rounds):
    """`slot` also says which piece is meant."""

    def slot(self, rank: int, piece: int) -> int:
        return ((rank * SLOTS + (self._first_slot + piece) % SLOTS + SLOTS * N) * 1000 + piece) * UNIT


def all_reduce(r: Any, recorder: Recorder, pieces: int) -> None:
    recorder.name = "all_reduce"
    reduction.all_reduce(r, 0, target=None, count=pieces * SLOT // 4, item=4, sums=recorder)  # type: ignore[arg-type]
    recorder.name = ""


def small_all_reduce(r: Any, recorder: Recorder, pieces: int) -> None:
    reduction.all_reduce_small(r, 0, size=SLOT, count=SLOT // 4, sums=recorder, scratch=(None, 0))  # type: ignore[arg-type]


def all_gather(r: Any, recorder: Recorder, pieces: int) -> None:
    movement.all_gather(r, 0, pieces * SLOT, [0] * N)


def broadcast(r: Any, recorder: Recorder, pieces: int) -> None:
    movement.broadcast(r, 0, pieces * SLOT, 1)


def scatter(r: Any, recorder: Recorder, pieces: int) -> None:
    movement.scatter(r, [0] * N if r.rank == 2 else None, pieces * PART, 0, 2)


def gather(r: Any, recorder: Recorder, pieces: int) -> None:
    movement.gather(r, 0, pieces * SLOT, [0] * N if r.rank == 0 else None, 0)


def reduce(r: Any, recorder: Recorder, pieces: int) -> None:
    reduction.reduce(r, 0, buffer=None, count=pieces * SLOT // 4, item=4, sums=recorder, root=1)  # type: ignore[arg-type]


def reduce_scatter(r: Any, recorder: Recorder, pieces: int) -> None:
    reduction.reduce_scatter(r, [0] * N, buffer=None, count=pieces * PART // 4, item=4, sums=recorder)  # type: ignore[arg-type]


Call = tuple[Callable[[Any, Recorder, int], None], int]


def record(calls: list[Call | None], rank: int, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps of one rank; None: a call that does not fit what another rank calls there."""
    recorder = Recorder(rank)
    for module in (movement, reduction):
        monkeypatch.setattr(module, "copy", recorder.copy)
    group = RecordedRounds(recorder, 1.0)  # type: ignore[arg-type]
    for number, call in enumerate(calls):
        if call is None:
            group.begin(99 + rank % 2, 0)
            group.post(1)
            recorder.same_call = lambda sequence, fact: False  # type: ignore[method-assign]
            recorder.call_of = lambda peer, sequence: (99 + peer % 2, 0)  # type: ignore[attr-defined]
            with pytest.raises(CollectiveMismatchError):
                group.meet()
            recorder.same_call = lambda sequence, fact: True  # type: ignore[method-assign]
            continue
        group.begin(number + 1, 0)
        call[0](group, recorder, call[1])
    return recorder.steps


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


SEQUENCES: dict[str, list[Call | None]] = {
    "small sums": [(small_all_reduce, 1)] * 6,
    "large sums": [(all_reduce, 1), (all_reduce, 3)],
    "a large sum after small ones": [(small_all_reduce, 1), (all_gather, 1), (all_reduce, 5)],
    "gathers": [(all_gather, 3), (small_all_reduce, 1), (all_gather, 6)],
    "from and to one rank": [(broadcast, 5), (scatter, 2), (gather, 3), (reduce, 2)],
    "many broadcasts": [(broadcast, 1)] * 6 + [(broadcast, 6)],
    "reduce_scatter": [(reduce_scatter, 3), (all_reduce, 2), (reduce_scatter, 1)],
    "calls that differ": [(small_all_reduce, 1), None, None, (all_reduce, 2), None, (all_gather, 2)],
    "ten calls that differ": [None] * 10 + [(small_all_reduce, 1)],
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_every_order_of_steps_with_a_fault_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [record(SEQUENCES[name], rank, monkeypatch) for rank in range(N)]
    states, ends = Model(programs, faults=1).explore()
    assert states > 1000
    assert (DONE,) * N in ends
    # A death ends every rank that needs the dead one; the others are through already.
    assert any(DEAD in kinds and LEFT in kinds for kinds in ends)


@pytest.mark.parametrize("name", ["small sums", "large sums"])
def test_every_order_with_two_faults_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [record(SEQUENCES[name][:4], rank, monkeypatch) for rank in range(N)]
    _, ends = Model(programs, faults=2).explore()
    assert (DONE,) * N in ends


def test_the_model_notices_too_few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "SLOTS", 2)
    monkeypatch.setattr("tests.comm.test_shared_memory_model.SLOTS", 2)
    programs = [record([(all_gather, 5)], rank, monkeypatch) for rank in range(N)]
    with pytest.raises(AssertionError):
        Model(programs, faults=0).explore()
