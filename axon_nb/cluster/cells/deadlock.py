"""Watch, while a cell runs, whether its ranks can still finish, and which rank the others wait for."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Container, Mapping, Sequence

from axon_nb.cluster.rpc.answers import Answer
from axon_nb.cluster.rpc.client import RankClient
from axon_nb.records.protocol.inspection import WaitsReply, WaitsRequest
from axon_nb.records.ranks import name_ranks
from axon_nb.records.waits.calls import RankWaits
from axon_nb.records.waits.deadlocks import explain_deadlock
from axon_nb.records.waits.silent_ranks import describe_silent_ranks
from axon_nb.records.waits.slow_ranks import describe_slow_ranks
from axon_nb.records.waits.started_calls import describe_absent_ranks, explain_mismatch

_FIRST_POLL_S = 0.6
_POLL_INTERVAL_S = 0.3
_WAITING_AFTER_S = 0.5
"""A rank counts as waiting once its call has lasted this long."""
_SILENT_AFTER_S = 2.0
"""A rank that has not replied for this long is stopped or stuck, or the machine is busy."""
_SLOW_AFTER_S = 3.0
"""A rank that others have waited for this long is named in the running cell."""


class DeadlockWatch:
    """Polls all ranks every 0.3 s; a deadlock is proven if two observations in a row show the same one.

    Args:
        client: The cluster's client.
        world: All live ranks.
        cell_ranks: The ranks that run the cell.
        dead: The dead ranks, kept up to date by its owner. Replies of a dead rank outside the cell are not awaited.
    """

    def __init__(
        self, client: RankClient, world: Sequence[int], cell_ranks: Sequence[int], *, dead: Container[int] = ()
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
        self._requests = {rank: future for rank, future in self._requests.items() if rank not in self._dead}
        if self._requests:
            self._silent = {rank: answer for rank, answer in self._requests.items() if not answer.done()}
            if not self._silent:
                return self._evaluate(unfinished)
            if now - self._requested_at > _SILENT_AFTER_S:
                return self._describe_silent()
            return ""
        if now >= self._next_poll:
            self._next_poll = now + _POLL_INTERVAL_S
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
        self.slow = describe_silent_ranks(
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
        self.slow = describe_slow_ranks(reports, _SLOW_AFTER_S) or describe_absent_ranks(
            started, self._cell_ranks, _SLOW_AFTER_S
        )
        text = (
            explain_deadlock(reports, self._cell_ranks, _WAITING_AFTER_S)
            or explain_mismatch(started)
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


def _correct_running(report: RankWaits, unfinished: Collection[int]) -> RankWaits:
    """Count an unfinished rank that runs nothing as running.

    It has not started the cell yet, which takes a while on a busy machine, or its reply is on the way and will arrive
    before the next observation.
    """
    return dataclasses.replace(report, running=report.running or report.rank in unfinished)
