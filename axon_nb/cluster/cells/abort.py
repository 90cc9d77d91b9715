"""Abort a cell on ranks that still run it: when, where and how gently.

An interrupt is a consistent cut: every rank stops before the same collective, so that none is a step ahead. While the
cell runs, `DeadlockWatch` observes whether its ranks can still finish, and which rank the others wait for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from axon_nb.cluster.cells.transitions import Abort
from axon_nb.cluster.divergence import DivergenceWatch, NumbersVerdict
from axon_nb.cluster.failures import RankError
from axon_nb.cluster.rpc import Answer, RankClient
from axon_nb.records import waits
from axon_nb.records.protocol.cells import AbortReply, AbortRequest, StopRequest
from axon_nb.records.protocol.inspection import StatusRequest, WaitsReply, WaitsRequest
from axon_nb.records.ranks import name_ranks
from axon_nb.records.telemetry import RankState

_ABORT_AFTER_S = 0.3
"""If a rank has failed, the others are aborted after this long at the latest; sooner if all of them wait."""
_ABORT_AFTER_DEATH_S = 0.05
"""If a rank has died, the others cannot continue for long, and its last output may still arrive."""
_STATUS_POLL_INTERVAL_S = 0.015
_DEAD_ACK_TIMEOUT_S = 2.0
"""A rank that is dead or stuck will not acknowledge an abort after this long."""
_ACK_TIMEOUT_S = 15.0
"""Any other rank will: on a busy machine that may take a while."""
_STOPPED_AFTER_S = 0.5
"""Ranks that have not noticed an abort for this long may be stopped (SIGSTOP)."""
_RESEND_INTERVAL_S = 0.25
"""An abort is sent again at this interval, because code may swallow the exception and continue."""
Counts = dict[str, int]
_CUT_POLL_INTERVAL_S = 0.015
_LEAD_TIME_S = 0.04
"""How far ahead the cut is set, at the pace of the fastest rank: all must know of it before they get there."""
_PROGRESS_TIMEOUT_S = 0.12
"""Ranks that have not all started a collective for this long are stuck, or do not communicate."""
_STOP_TIMEOUT_S = 0.4
"""Ranks that have not stopped at the cut after this long will not."""
_FIRST_POLL_S = 0.6
_WAITS_POLL_INTERVAL_S = 0.3
_WAITING_AFTER_S = 0.5
"""A rank counts as waiting once its call has lasted this long."""
_SILENT_AFTER_S = 2.0
"""A rank that has not replied for this long is stopped or stuck, or the machine is busy."""
_SLOW_AFTER_S = 3.0
"""A rank that others have waited for this long is named in the running cell."""


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

    def step(self, now: float, unfinished: Sequence[int], cell: Abort) -> None:
        """Do what is due.

        Args:
            now: The time.
            unfinished: The ranks that still run the cell.
            cell: How the cell stands.
        """
        if self.aborted_at is None and not self._is_due(now, unfinished, cell):
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
                self._last_aborts[rank] = self._client.request(rank, AbortRequest(self.run, again, cell.interrupted))
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

    def _is_due(self, now: float, unfinished: Sequence[int], cell: Abort) -> bool:
        if cell.timed_out or (cell.interrupted and self._cut_failed(now)):
            return True
        if cell.failed_at is not None:
            delay_s = _ABORT_AFTER_DEATH_S if cell.died else _ABORT_AFTER_S
            return now - cell.failed_at > delay_s or self._all_waiting(now, unfinished)
        if self.numbers is not None and not cell.interrupted:
            self.explanation = self.numbers.step(now)
        if self._watch is not None and not cell.interrupted and not self.explanation:
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
        if not self._status_requests and now - self._status_requested_at > _STATUS_POLL_INTERVAL_S:
            self._status_requested_at = now
            self._status_requests = {rank: self._client.request(rank, StatusRequest()) for rank in unfinished}
        return False


class ConsistentCut:
    """Counts the collectives that each rank has started until all have made progress, then sets the stop.

    The stop is a sequence number of a group that all ranks are in and make progress in. If there is no such group, as
    with tensor parallelism next to data parallelism, it is a number of collectives over all groups. Ranks that run the
    same program then stop at the same place, and the others are aborted one by one after a timeout.

    Args:
        client: The cluster's client.
        ranks: The ranks that run the cell: all ranks of the world, as some ranks alone cannot be cut consistently.
        now: The time.
    """

    def __init__(self, client: RankClient, ranks: Sequence[int], now: float) -> None:
        self._client = client
        self._ranks = list(ranks)
        self._started_at = now
        self._observations: list[tuple[float, dict[int, Counts]]] = []
        self._requests: dict[int, Answer[WaitsReply]] = {}
        self._is_set = False
        self._observe(now)

    def _observe(self, now: float) -> None:
        self._requested_at = now
        self._requests = {rank: self._client.request(rank, WaitsRequest()) for rank in self._ranks}

    def step(self, now: float) -> bool:
        """Do what is due; return True if ranks must be aborted instead: a cut is impossible, or it did not work."""
        if self._is_set:
            return now - self._started_at > _STOP_TIMEOUT_S
        if self._requests and all(future.done() for future in self._requests.values()):
            counts = {rank: _call_counts(future) for rank, future in self._requests.items()}
            self._observations.append((self._requested_at, counts))
            self._requests = {}
            if len(self._observations) > 1:
                group = progressing_group(self._observations[0][1], self._observations[-1][1])
                if group is not None:
                    self._set_stop(group)
                    return False
        if now - self._started_at > _PROGRESS_TIMEOUT_S:
            return True
        if not self._requests and now - self._requested_at >= _CUT_POLL_INTERVAL_S:
            self._observe(now)
        return False

    def _set_stop(self, group: str) -> None:
        (before, first), (after, last) = self._observations[0], self._observations[-1]
        at = cut_sequence_number(group, first, last, seconds=after - before)
        for rank in self._ranks:
            self._client.request(rank, StopRequest(group, at))
        self._is_set = True


def progressing_group(first: Mapping[int, Counts], last: Mapping[int, Counts]) -> str | None:
    """Find the group to cut in: the busiest one in which all ranks make progress.

    Args:
        first: Started collectives by rank and group; under "" the cell's collectives over all groups.
        last: The same, later.

    Returns:
        The group's name; "" for all groups together; None if there is no progress.
    """
    progress = {
        group: min(counts[group] - first[rank].get(group, 0) for rank, counts in last.items())
        for group in set.intersection(*(set(counts) for counts in last.values()))
    }
    total = progress.pop("", 0)
    busiest = max(sorted(progress), key=lambda group: progress[group], default="")
    if busiest and progress[busiest] > 0:
        return busiest
    return "" if total > 0 else None


def cut_sequence_number(group: str, first: Mapping[int, Counts], last: Mapping[int, Counts], *, seconds: float) -> int:
    """Return the sequence number of the group's first collective that no rank starts, far enough ahead for all ranks.

    Args:
        group: See `progressing_group`; it may have been created since the first observation.
        first: Started collectives by rank and group.
        last: The same, `seconds` later.
        seconds: Time between the observations.
    """
    progress = max(counts[group] - first[rank].get(group, 0) for rank, counts in last.items())
    lead = max(2, int(progress / max(seconds, 1e-3) * _LEAD_TIME_S))
    return max(counts[group] for counts in last.values()) + lead


def _call_counts(answer: Answer[WaitsReply]) -> Counts:
    reply = answer.reply()
    return {"": 0} if reply is None else {**reply.waits.counts, "": reply.collectives}


class DeadlockWatch:
    """Polls all ranks every 0.3 s; a deadlock is proven if two observations in a row show the same one.

    Args:
        client: The cluster's client.
        world: All live ranks.
        cell_ranks: The ranks that run the cell.
        dead: Returns the dead ranks. Replies of a dead rank outside the cell are not awaited.
    """

    def __init__(
        self,
        client: RankClient,
        world: Sequence[int],
        cell_ranks: Sequence[int],
        *,
        dead: Callable[[], Container[int]] = tuple,
    ) -> None:
        self._client = client
        self._dead = dead
        self._world = list(world)
        self._cell_ranks = list(cell_ranks)
        self._next_poll = time.monotonic() + _FIRST_POLL_S
        self._requests: dict[int, Answer[WaitsReply]] = {}
        self._requested_at = 0.0
        self._silent: dict[int, Answer[WaitsReply]] = {}
        """Ranks that did not reply to the last request, and what may still come."""
        self.stopped: set[int] = set()
        """Ranks that do not reply because their process is stopped, as seen by those that wait for them."""
        self._suspect: tuple[str, object] | None = None
        self.slow = ""
        """Which rank the others wait for, as of the last observation; empty while there is none, or not for long."""

    def step(self, now: float, unfinished: Collection[int]) -> str:
        """Do what is due; return the explanation once a deadlock is proven, empty before.

        Args:
            now: The time.
            unfinished: The ranks that have not finished the cell, as far as the notebook knows.
        """
        if self._requests:
            dead = self._dead()
            self._requests = {rank: future for rank, future in self._requests.items() if rank not in dead}
        if self._requests:
            self._silent = {rank: answer for rank, answer in self._requests.items() if not answer.done()}
            if not self._silent:
                return self._evaluate(unfinished)
            if now - self._requested_at > _SILENT_AFTER_S:
                return self._describe_silent()
            return ""
        if now >= self._next_poll:
            self._next_poll = now + _WAITS_POLL_INTERVAL_S
            self._requested_at = now
            for rank in self._world:
                with contextlib.suppress(KeyError):  # it has just died
                    self._requests[rank] = self._request(rank)
        return ""

    def _request(self, rank: int) -> Answer[WaitsReply]:
        # To a rank that has not replied yet nothing is sent: requests would pile up there.
        pending = self._silent.get(rank)
        return pending if pending is not None and not pending.done() else self._client.request(rank, WaitsRequest())

    def _describe_silent(self) -> str:
        """Name a rank that does not reply, if others wait for it; a deadlock is not proven without its report.

        Returns:
            Which operation is past its group's timeout, if one is: that limit holds for a rank that hangs, too.
        """
        replies = {rank: answer.reply() for rank, answer in self._requests.items() if answer.done()}
        known = {rank: reply for rank, reply in replies.items() if reply is not None}
        self._requests, self._suspect = {}, None
        self.stopped = {peer.rank for reply in known.values() for peer in reply.peers if peer.is_stopped}
        self.slow = waits.describe_silent_ranks(
            {rank: reply.waits for rank, reply in known.items()},
            {rank: reply.peers for rank, reply in known.items()},
            self._silent,
            _SLOW_AFTER_S,
        )
        late = _describe_overdue(known)
        verb = "does" if len(self._silent) == 1 else "do"
        return late and f"{late[:-1]}, but {name_ranks(self._silent)} {verb} not reply."

    def _evaluate(self, unfinished: Collection[int]) -> str:
        replies = {rank: answer.reply() for rank, answer in self._requests.items()}
        self._requests, self.stopped = {}, set()
        reports = {
            rank: _correct_running(reply.waits, unfinished) for rank, reply in replies.items() if reply is not None
        }
        if len(reports) < len(replies):
            return ""
        started = {rank: reply.started for rank, reply in replies.items() if reply is not None}
        self.slow = waits.describe_slow_ranks(reports, _SLOW_AFTER_S) or waits.describe_absent_ranks(
            started, self._cell_ranks, _SLOW_AFTER_S
        )
        text = (
            waits.explain_deadlock(reports, self._cell_ranks, _WAITING_AFTER_S)
            or waits.explain_mismatch(started)
            or _describe_overdue(replies)
        )
        if not text:
            self._suspect = None
            return ""
        picture = {rank: [call.number for call in report.pending] for rank, report in reports.items()}
        proven = self._suspect is not None and self._suspect[1] == picture
        self._suspect = (text, picture)
        return text if proven else ""


def _describe_overdue(replies: Mapping[int, WaitsReply | None]) -> str:
    """Name an operation that is past its group's timeout, if what it waits for cannot be seen."""
    late = {rank: reply.overdue for rank, reply in replies.items() if reply is not None and reply.overdue}
    if not late:
        return ""
    first = min(late)
    return f"{name_ranks(late)}: {late[first]}. Nothing shows what it waits for."


def _correct_running(report: waits.RankWaits, unfinished: Collection[int]) -> waits.RankWaits:
    """Count an unfinished rank that runs nothing as running.

    It has not started the cell yet, which takes a while on a busy machine, or its reply is on the way and will arrive
    before the next observation.
    """
    return msgspec.structs.replace(report, running=report.running or report.rank in unfinished)
