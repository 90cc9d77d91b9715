"""No order of steps, deaths and aborts makes ranks wait for ever or read what is not theirs: every order is tried.

What each of three ranks does is recorded from the real code, with a group that never waits. A rank's slots hold what
its place in that list says, for it alone writes them; so a state is the ranks' places, and whether they are gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from axon_nb.comm.shared_memory.collectives import rounds
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
