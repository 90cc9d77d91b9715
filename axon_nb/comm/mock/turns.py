"""Ranks as threads that run one at a time: each until it must wait, then the next that can go on.

The order depends on nothing but the program, so a run gives the same bits every time, and a world in which nobody can
go on is known at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from axon_nb.comm.errors import WorldStuck
from axon_nb.records.ranks import format_ranks

__all__ = ["Context", "RankEnded", "Turns"]

_PIECE_S = 0.05


class RankEnded(BaseException):
    """The world has ended because another rank failed. No `Exception`, so that user code does not swallow it."""


class Context(Protocol):
    """What belongs to one rank and is put in place for its turn."""

    def enter(self) -> None:
        """The rank's turn begins."""

    def leave(self) -> None:
        """The rank's turn ends."""


@dataclass
class _Seat:
    """One rank."""

    turn: threading.Event = field(default_factory=threading.Event)
    ready: Callable[[], bool] | None = None
    """Whether what it waits for is there; None while it does not wait."""
    waits_in: Callable[[], str] = str
    over: bool = False
    result: Any = None
    error: BaseException | None = None


class Turns:
    """Runs functions as ranks.

    Args:
        contexts: One a rank.
    """

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._contexts = list(contexts)
        self._seats = [_Seat() for _ in contexts]
        self._own = threading.local()
        self._all_over = threading.Event()
        self._ending: BaseException | None = None
        self.failed: list[int] = []
        """Ranks that raised, in the order in which they did."""

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Run `function(rank)` as every rank; the results in the order of ranks.

        Raises:
            BaseException: what the first rank to fail raised; the others are ended.
        """
        threads = [
            threading.Thread(target=self._work, args=(rank, function), name=f"axon_nb-mock-rank{rank}", daemon=True)
            for rank in range(len(self._seats))
        ]
        for thread in threads:
            thread.start()
        self._seats[0].turn.set()
        try:
            while not self._all_over.wait(_PIECE_S):
                pass
        except BaseException as error:  # Ctrl-C: the ranks end at their next communication
            self._ending = error
            raise
        for thread in threads:
            thread.join()
        if self.failed:
            cause = self._seats[self.failed[0]].error
            assert cause is not None
            raise cause
        return [seat.result for seat in self._seats]

    def _work(self, rank: int, function: Callable[[int], Any]) -> None:
        seat = self._seats[rank]
        self._own.rank = rank
        seat.turn.wait()
        self._contexts[rank].enter()
        try:
            if self._ending is None:
                seat.result = function(rank)
        except RankEnded:
            pass
        except BaseException as error:
            seat.error = error
            self.failed.append(rank)
            self._ending = error
        seat.over = True
        self._contexts[rank].leave()
        self._pass_on(rank)

    @property
    def rank(self) -> int | None:
        """The rank whose thread this is; None outside."""
        return getattr(self._own, "rank", None)

    def wait_for(self, ready: Callable[[], bool], waits_in: Callable[[], str]) -> None:
        """On a rank's thread: let others run until `ready()`.

        Raises:
            WorldStuck: that can never be, as every other rank waits too or is over.
            RankEnded: another rank failed.
        """
        rank = self.rank
        assert rank is not None
        seat = self._seats[rank]
        self._raise_if_ending()
        if ready():
            return
        seat.ready, seat.waits_in = ready, waits_in
        seat.turn.clear()
        self._contexts[rank].leave()
        self._pass_on(rank)
        seat.turn.wait()
        self._contexts[rank].enter()
        seat.ready = None
        self._raise_if_ending()
        if not ready():
            raise WorldStuck(self._who_waits())

    def _raise_if_ending(self) -> None:
        if self._ending is not None:
            raise RankEnded

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can use it."""
        count = len(self._seats)
        order = [(rank + 1 + offset) % count for offset in range(count)]
        living = [other for other in order if not self._seats[other].over]
        if not living:
            self._all_over.set()
            return
        for other in living:
            seat = self._seats[other]
            if self._ending is not None or seat.ready is None or seat.ready():
                seat.turn.set()
                return
        # Nobody can: the lowest rank says so, and its failure ends the others.
        self._seats[min(living)].turn.set()

    def _who_waits(self) -> str:
        groups: dict[str, list[int]] = {}
        for rank, seat in enumerate(self._seats):
            groups.setdefault("over" if seat.over else f"waiting in {seat.waits_in()}", []).append(rank)
        text = "; ".join(f"{_named(ranks)} {what}" for what, ranks in groups.items())
        return f"No rank can go on: {text}. Every rank of a group makes the same calls in the same order."


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {format_ranks(ranks)} are"
