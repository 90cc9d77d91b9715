"""Looking, while a cell runs, whether it can still end by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from axon_nb.cluster.client import RankClient
from axon_nb.records.waits import PendingCall, RankWaits, explain

__all__ = ["DeadlockWatch"]

_FIRST_S = 0.6
_EVERY_S = 0.3
_WAITED_S = 0.5
"""A call counts as waited for after this long."""


class DeadlockWatch:
    """Asks all ranks every 0.3 s; a deadlock is proven when two looks in a row show the same one.

    Args:
        client: The cluster's client.
        world: All ranks that live.
        cell_ranks: The ranks that run the cell.
    """

    def __init__(self, client: RankClient, world: Sequence[int], cell_ranks: Sequence[int]) -> None:
        self._client = client
        self._world = list(world)
        self._cell_ranks = list(cell_ranks)
        self._next = time.monotonic() + _FIRST_S
        self._asked: dict[int, Any] = {}
        self._suspect: tuple[str, object] | None = None

    def step(self, now: float) -> str:
        """Do what is due; the explanation once a deadlock is proven, empty before."""
        if self._asked:
            if not all(future.done() for future in self._asked.values()):
                return ""
            return self._judge()
        if now >= self._next:
            self._next = now + _EVERY_S
            self._asked = {rank: self._client.request(rank, "axon_waits") for rank in self._world}
        return ""

    def _judge(self) -> str:
        answers = {rank: future.result()["content"] for rank, future in self._asked.items()}
        self._asked = {}
        if any("error" in answer for answer in answers.values()):
            return ""
        reports = {rank: _report(answer) for rank, answer in answers.items()}
        text = explain(reports, self._cell_ranks, _WAITED_S)
        if text is None:
            self._suspect = None
            return ""
        picture = {rank: [call.number for call in report.pending] for rank, report in reports.items()}
        proven = self._suspect is not None and self._suspect[1] == picture
        self._suspect = (text, picture)
        return text if proven else ""


def _report(answer: dict[str, Any]) -> RankWaits:
    pending = tuple(PendingCall(**{**call, "ranks": tuple(call["ranks"])}) for call in answer["pending"])
    known = {name: value for name, value in answer.items() if name != "collectives"}
    return RankWaits(**{**known, "pending": pending})
