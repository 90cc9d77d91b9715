"""Abort a cell on ranks that still run it: when, and how gently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from axon_nb.cluster.cells.consistent_cut import ConsistentCut
from axon_nb.cluster.cells.deadlock import DeadlockWatch
from axon_nb.cluster.divergence.verdict import NumbersVerdict
from axon_nb.cluster.divergence.watch import DivergenceWatch
from axon_nb.cluster.failures.report import RankError
from axon_nb.cluster.rpc.answers import Answer
from axon_nb.cluster.rpc.client import RankClient
from axon_nb.records.protocol.aborts import AbortReply, AbortRequest
from axon_nb.records.protocol.inspection import StatusRequest
from axon_nb.records.telemetry import RankState

_ABORT_AFTER_S = 0.3
"""If a rank has failed, the others are aborted after this long at the latest; sooner if all of them wait."""
_ABORT_AFTER_DEATH_S = 0.05
"""If a rank has died, the others cannot continue for long, and its last output may still arrive."""
_POLL_INTERVAL_S = 0.015
_DEAD_ACK_TIMEOUT_S = 2.0
"""A rank that is dead or stuck will not acknowledge an abort after this long."""
_ACK_TIMEOUT_S = 15.0
"""Any other rank will: on a busy machine that may take a while."""
_STOPPED_AFTER_S = 0.5
"""Ranks that have not noticed an abort for this long may be stopped (SIGSTOP)."""
_RESEND_INTERVAL_S = 0.25
"""An abort is sent again at this interval, because code may swallow the exception and continue."""


class AbortController:
    """Decides when to abort the ranks of a cell, and aborts them.

    Args:
        client: The cluster's client.
        ranks: The ranks of the cell.
        watch: Detects deadlocks; None: deadlocks are not detected.
        can_cut: Whether an interrupt may be a consistent cut, which needs all ranks of the world.
        stopped: Takes the time; returns the ranks that are stopped (SIGSTOP), and the controller's pid if it is.
    """

    def __init__(
        self,
        client: RankClient,
        ranks: Sequence[int],
        *,
        watch: DeadlockWatch | None = None,
        can_cut: bool = False,
        stopped: Callable[[float], tuple[AbstractSet[int], int]] = lambda now: (frozenset(), 0),
    ) -> None:
        self._client = client
        self._ask_stopped = stopped
        self._stopped: tuple[AbstractSet[int], int] = (frozenset(), 0)
        self._ranks = list(ranks)
        self._watch = watch
        self._can_cut = can_cut
        self.explanation = ""
        """Why the cell could not finish by itself; empty if it could."""
        self.numbers: DivergenceWatch | None = None
        """Compares the ranks' numbers (`config watch_numbers`); None: nothing does."""
        self.run: str | None = None
        """Name of the cell's run: a rank that has not started it when it is aborted rejects it."""
        self.aborted_at: float | None = None
        """When the first abort was sent; None: none was."""
        self._cut: ConsistentCut | None = None
        self._interval_start = 0.0
        self._aborts: list[tuple[int, Answer[AbortReply]]] = []
        self._last_sent: float | None = None
        self._status_requests: dict[int, Answer[RankState]] = {}
        self._status_requested_at = 0.0
        self._last_aborts: dict[int, Answer[AbortReply]] = {}
        self._unresponsive: dict[int, str] = {}

    @property
    def aborting(self) -> bool:
        """Whether ranks were asked to stop, by a cut or by an abort."""
        return self.aborted_at is not None or self._cut is not None

    def acknowledged(self, now: float, gone: AbstractSet[int]) -> bool:
        """Whether every abort was acknowledged or timed out: a late one would break the groups that are rebuilt.

        Args:
            now: The time.
            gone: The ranks that are dead or stuck.
        """
        pending = {rank for rank, future in self._aborts if not future.done()}
        if not pending or self._last_sent is None or all(map(self.is_stopped, pending)):
            return True
        return now - self._last_sent > (_DEAD_ACK_TIMEOUT_S if pending <= gone else _ACK_TIMEOUT_S)

    @property
    def slow(self) -> str:
        """Which rank the others wait for while nothing is aborted; empty while there is none, or not for long."""
        return self._watch.slow if self._watch is not None and not self.aborting else ""

    def resend(self) -> None:
        """Send the abort again at the next step."""
        self._interval_start = 0.0

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
            failed_at: When the first rank failed; None: none has.
            died: Whether a rank has died.
            interrupted: Whether the user interrupted the cell.
            timed_out: Whether the cell has timed out.
        """
        if self.aborted_at is None and not self._is_due(now, unfinished, failed_at, interrupted, timed_out, died=died):
            return
        if self.aborted_at is None:
            self.aborted_at = now
        if now - self.aborted_at > _STOPPED_AFTER_S and unfinished:
            self._stopped = self._ask_stopped(now)
        if now - self._interval_start >= _RESEND_INTERVAL_S:
            again, self._interval_start = bool(self._interval_start), now
            self._last_sent = now
            for rank in unfinished:
                self._read_reply(rank)
                self._last_aborts[rank] = self._client.request(rank, AbortRequest(self.run, again, interrupted))
                self._aborts.append((rank, self._last_aborts[rank]))

    def _read_reply(self, rank: int) -> None:
        """Read the rank's reply to the last abort: a rank in C code has not noticed it."""
        last = self._last_aborts.get(rank)
        if last is None:
            return
        if not last.done():  # a busy machine, or C code that holds the GIL: keep what is known
            self._unresponsive.setdefault(rank, "")
            return
        reply = last.reply()
        self._unresponsive.pop(rank, None)
        if reply is not None and reply.pending:
            self._unresponsive[rank] = f" at line {reply.line}" if reply.line else ""

    def judge_numbers(self, *, failed: bool) -> NumbersVerdict | None:
        """Return what was seen of the numbers of a cell that is over; None: it was not watched.

        Args:
            failed: Whether the cell raised an error of its own, which is then shown.
        """
        if self.numbers is None:
            return None
        verdict = self.numbers.finish()
        if self.numbers.stops and verdict.finding is not None and not failed:
            self.explanation = self.explanation or str(verdict.finding)
        return verdict

    def is_unresponsive(self, rank: int) -> bool:
        """Whether the rank is in C code: it was sent an abort and has not noticed it."""
        return rank in self._unresponsive

    def is_stopped(self, rank: int) -> bool:
        """Whether nothing reaches the rank: its process is stopped (SIGSTOP), or the controller's is."""
        ranks, controller = self._stopped
        return rank in ranks or controller > 0

    def stuck(self, rank: int) -> RankError:
        """Describe what a rank is stuck in."""
        ranks, controller = self._stopped
        reason, remedy = "is still busy and does not react to interrupts", ""
        if controller:
            reason = "did not receive the interrupt: the controller is stopped (SIGSTOP)"
            remedy = f"Run `kill -CONT {controller}` to let the controller continue, or `%distributed restart`."
        elif rank in ranks or (self._watch is not None and rank in self._watch.stopped):
            reason = "is stopped (SIGSTOP) and does not react to interrupts"
        elif rank in self._unresponsive:
            reason = f"is still in C code{self._unresponsive[rank]} and does not react to interrupts"
        return RankError(rank, "stuck", "", reason, remedy=remedy)

    def _is_due(
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
            delay_s = _ABORT_AFTER_DEATH_S if died else _ABORT_AFTER_S
            return now - failed_at > delay_s or self._all_waiting(now, unfinished)
        if self.numbers is not None and not interrupted:
            self.explanation = self.numbers.step(now)
        if self._watch is not None and not interrupted and not self.explanation:
            self.explanation = self._watch.step(now, unfinished)
        return bool(self.explanation)

    def _cut_failed(self, now: float) -> bool:
        if not self._can_cut:
            return True
        if self._cut is None:
            self._cut = ConsistentCut(self._client, self._ranks, now)
        return self._cut.step(now)

    def _all_waiting(self, now: float, unfinished: Sequence[int]) -> bool:
        """Whether every rank that still runs the cell waits in a communication call, polled now and then."""
        if self._status_requests and all(future.done() for future in self._status_requests.values()):
            replies = {rank: answer.reply() for rank, answer in self._status_requests.items()}
            states = {rank: state for rank, state in replies.items() if state is not None}
            self._status_requests = {}
            if set(unfinished) <= set(states) and all(states[rank].call for rank in unfinished):
                return True
        if not self._status_requests and now - self._status_requested_at > _POLL_INTERVAL_S:
            self._status_requested_at = now
            self._status_requests = {rank: self._client.request(rank, StatusRequest()) for rank in unfinished}
        return False
