"""Looking, while a cell runs, whether it can still end by itself, and who is waited for."""

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

_FIRST_S = 0.6
_EVERY_S = 0.3
_WAITED_S = 0.5
"""A call counts as waited for after this long."""
_SLOW_S = 3.0
"""A rank that is waited for this long is named in the running cell."""


class DeadlockWatch:
    """Asks all ranks every 0.3 s; a deadlock is proven when two looks in a row show the same one.

    Args:
        client: The cluster's client.
        world: All ranks that live.
        cell_ranks: The ranks that run the cell.
        dead: Those that have died, as of now: one that does not run the cell is not waited for any more.
    """

    def __init__(
        self, client: RankClient, world: Sequence[int], cell_ranks: Sequence[int], *, dead: Container[int] = ()
    ) -> None:
        self._client = client
        self._dead = dead
        self._world = list(world)
        self._cell_ranks = list(cell_ranks)
        self._next = time.monotonic() + _FIRST_S
        self._asked: dict[int, Answer[WaitsReply]] = {}
        self._suspect: tuple[str, object] | None = None
        self.slow = ""
        """Who is waited for, and by whom, as of the last look; empty while nobody is, or not for long."""

    def step(self, now: float, unfinished: Collection[int]) -> str:
        """Do what is due; the explanation once a deadlock is proven, empty before.

        Args:
            now: The time.
            unfinished: The ranks that have not ended the cell, as far as the notebook knows.
        """
        self._asked = {rank: future for rank, future in self._asked.items() if rank not in self._dead}
        if self._asked:
            if not all(future.done() for future in self._asked.values()):
                return ""
            return self._judge(unfinished)
        if now >= self._next:
            self._next = now + _EVERY_S
            for rank in self._world:
                with contextlib.suppress(KeyError):  # it has just died
                    self._asked[rank] = self._client.request(rank, WaitsRequest())
        return ""

    def _judge(self, unfinished: Collection[int]) -> str:
        replies = {rank: answer.reply() for rank, answer in self._asked.items()}
        self._asked = {}
        reports = {rank: _as_of_cell(reply.waits, unfinished) for rank, reply in replies.items() if reply is not None}
        if len(reports) < len(replies):
            return ""
        self.slow = describe_slow_ranks(reports, _SLOW_S)
        text = explain_deadlock(reports, self._cell_ranks, _WAITED_S)
        if text is None:
            self._suspect = None
            return ""
        picture = {rank: [call.number for call in report.pending] for rank, report in reports.items()}
        proven = self._suspect is not None and self._suspect[1] == picture
        self._suspect = (text, picture)
        return text if proven else ""


def _as_of_cell(report: RankWaits, unfinished: Collection[int]) -> RankWaits:
    """A rank that runs nothing and has not told the cell's end has not begun it: on a busy machine that takes a while.

    Or its end is on the way, and known at the next look.
    """
    return dataclasses.replace(report, running=report.running or report.rank in unfinished)
