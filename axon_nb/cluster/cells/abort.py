"""Ending a cell on ranks that still run it: when, and how gently."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from axon_nb.cluster.cells.consistent_cut import ConsistentCut
from axon_nb.cluster.cells.deadlock import DeadlockWatch
from axon_nb.cluster.rpc.answers import Answer
from axon_nb.cluster.rpc.client import RankClient
from axon_nb.records.protocol.cells import AbortReply, AbortRequest
from axon_nb.records.protocol.inspection import StatusRequest
from axon_nb.records.telemetry import RankState

__all__ = ["Ending"]

_ABORT_AFTER_S = 0.3
"""When a rank has failed, the others are ended at the latest after this long; sooner when all of them wait."""
_DEAD_AFTER_S = 0.05
"""When a rank has died: nobody can go on for long, and its last words may still come."""
_ASK_EVERY_S = 0.015
_ANSWER_S = 2.0
"""A rank that has died or was given up does not answer an abort any more after this long."""
_LATE_ANSWER_S = 15.0
"""Any other does: on a busy machine that may take a while."""
_REPEAT_S = 0.25
"""An abort is sent again as often: code may swallow the exception and go on."""


class Ending:
    """Decides that the ranks of a cell are to be ended, and ends them.

    Args:
        client: The cluster's client.
        ranks: The ranks of the cell.
        watch: Looks for deadlocks; None: nobody does.
        cuttable: Whether an interrupt may be a consistent cut, which takes all ranks of the world.
    """

    def __init__(
        self, client: RankClient, ranks: Sequence[int], *, watch: DeadlockWatch | None = None, cuttable: bool = False
    ) -> None:
        self._client = client
        self._ranks = list(ranks)
        self._watch = watch
        self._cuttable = cuttable
        self.explanation = ""
        """Why the cell could not end by itself; empty when it could."""
        self.run: str | None = None
        """Name of the cell's run: ranks that have not begun it refuse it then."""
        self.aborted_at: float | None = None
        """When ranks were first told to abort; None while they were not."""
        self._cut: ConsistentCut | None = None
        self._last_abort = 0.0
        self._aborts: list[tuple[int, Answer[AbortReply]]] = []
        self._last_sent: float | None = None
        self._asked: dict[int, Answer[RankState]] = {}
        self._asked_at = 0.0
        self._answers: dict[int, Answer[AbortReply]] = {}
        self._deaf: dict[int, str] = {}

    @property
    def begun(self) -> bool:
        """Whether ranks have been told to end, gently or not."""
        return self.aborted_at is not None or self._cut is not None

    def settled(self, now: float, gone: AbstractSet[int]) -> bool:
        """Whether every abort has been carried out: a late one would break the groups that are formed anew.

        Args:
            now: The time.
            gone: The ranks that have died, or were given up.
        """
        awaited = {rank for rank, future in self._aborts if not future.done()}
        if not awaited or self._last_sent is None:
            return True
        return now - self._last_sent > (_ANSWER_S if awaited <= gone else _LATE_ANSWER_S)

    @property
    def slow(self) -> str:
        """Which rank is waited for while nobody is told to end; empty when none is, or not for long."""
        return self._watch.slow if self._watch is not None and not self.begun else ""

    def hurry(self) -> None:
        """Tell them again at the next step."""
        self._last_abort = 0.0

    def step(
        self,
        now: float,
        unfinished: Sequence[int],
        *,
        failed_at: float | None,
        died: bool,
        interrupted: bool,
        timed_out: bool,
    ) -> None:
        """Do what is due.

        Args:
            now: The time.
            unfinished: The ranks that still run the cell.
            failed_at: When the first rank failed; None while none has.
            died: Whether a rank has died.
            interrupted: Whether the user wants the cell to end.
            timed_out: Whether its time is over.
        """
        if self.aborted_at is None and not self._due(now, unfinished, failed_at, interrupted, timed_out, died=died):
            return
        if self.aborted_at is None:
            self.aborted_at = now
        if now - self._last_abort >= _REPEAT_S:
            again, self._last_abort = bool(self._last_abort), now
            self._last_sent = now
            for rank in unfinished:
                self._listen(rank)
                self._answers[rank] = self._client.request(rank, AbortRequest(self.run, again))
                self._aborts.append((rank, self._answers[rank]))

    def _listen(self, rank: int) -> None:
        """Take in how the rank answered to the abort before the next: one in C code has not noticed it."""
        before = self._answers.get(rank)
        if before is None:
            return
        if not before.done():  # a busy machine, or C code that keeps the GIL: what was known of it stays
            self._deaf.setdefault(rank, "")
            return
        answer = before.reply()
        self._deaf.pop(rank, None)
        if answer is not None and answer.unheard:
            self._deaf[rank] = f" at line {answer.line}" if answer.line else ""

    def deaf(self, rank: int) -> bool:
        """Whether the rank is in C code: it was told to end and has not noticed."""
        return rank in self._deaf

    def why_stuck(self, rank: int) -> str:
        """What a rank does that does not end; reads after its name."""
        if rank in self._deaf:
            return f"is still in C code{self._deaf[rank]} and does not react to interrupts"
        return "is still busy and does not react to interrupts"

    def _due(
        self,
        now: float,
        unfinished: Sequence[int],
        failed_at: float | None,
        interrupted: bool,
        timed_out: bool,
        *,
        died: bool,
    ) -> bool:
        if timed_out or (interrupted and self._cut_failed(now)):
            return True
        if failed_at is not None:
            limit_s = _DEAD_AFTER_S if died else _ABORT_AFTER_S
            return now - failed_at > limit_s or self._all_wait(now, unfinished)
        if self._watch is not None and not interrupted:
            self.explanation = self._watch.step(now, unfinished)
        return bool(self.explanation)

    def _cut_failed(self, now: float) -> bool:
        if not self._cuttable:
            return True
        if self._cut is None:
            self._cut = ConsistentCut(self._client, self._ranks, now)
        return self._cut.step(now)

    def _all_wait(self, now: float, unfinished: Sequence[int]) -> bool:
        """Whether every rank that still runs the cell waits in a communication call; asks them now and then."""
        if self._asked and all(future.done() for future in self._asked.values()):
            states = {rank: state for rank, answer in self._asked.items() if (state := answer.reply()) is not None}
            self._asked = {}
            if set(unfinished) <= set(states) and all(states[rank].call for rank in unfinished):
                return True
        if not self._asked and now - self._asked_at > _ASK_EVERY_S:
            self._asked_at = now
            self._asked = {rank: self._client.request(rank, StatusRequest()) for rank in unfinished}
        return False
