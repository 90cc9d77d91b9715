"""Watch, while a cell runs, whether its ranks can still finish, and which rank the others wait for."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Container, Sequence

from axon_nb.cluster.rpc.answers import Answer
from axon_nb.cluster.rpc.client import RankClient
from axon_nb.records.protocol.inspection import WaitsReply, WaitsRequest
from axon_nb.records.waits import RankWaits, describe_slow_ranks, explain_deadlock

__all__ = ["DeadlockWatch"]

_FIRST_POLL_S = 0.6
_POLL_INTERVAL_S = 0.3
_WAITING_AFTER_S = 0.5
"""A rank counts as waiting once its call has lasted this long."""
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
            if not all(future.done() for future in self._requests.values()):
                return ""
            return self._evaluate(unfinished)
        if now >= self._next_poll:
            self._next_poll = now + _POLL_INTERVAL_S
            for rank in self._world:
                with contextlib.suppress(KeyError):  # it has just died
                    self._requests[rank] = self._client.request(rank, WaitsRequest())
        return ""

    def _evaluate(self, unfinished: Collection[int]) -> str:
        replies = {rank: answer.reply() for rank, answer in self._requests.items()}
        self._requests = {}
        reports = {
            rank: _correct_running(reply.waits, unfinished) for rank, reply in replies.items() if reply is not None
        }
        if len(reports) < len(replies):
            return ""
        self.slow = describe_slow_ranks(reports, _SLOW_AFTER_S)
        text = explain_deadlock(reports, self._cell_ranks, _WAITING_AFTER_S)
        if text is None:
            self._suspect = None
            return ""
        picture = {rank: [call.number for call in report.pending] for rank, report in reports.items()}
        proven = self._suspect is not None and self._suspect[1] == picture
        self._suspect = (text, picture)
        return text if proven else ""


def _correct_running(report: RankWaits, unfinished: Collection[int]) -> RankWaits:
    """Count an unfinished rank that runs nothing as running.

    It has not started the cell yet, which takes a while on a busy machine, or its reply is on the way and will arrive
    before the next observation.
    """
    return dataclasses.replace(report, running=report.running or report.rank in unfinished)
