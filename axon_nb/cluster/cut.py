"""An interrupt as a consistent cut: every rank stops before the same collective, so that none is a step ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axon_nb.cluster.client import RankClient

__all__ = ["ConsistentCut"]

_LOOK_S = 0.015
_AHEAD_S = 0.04
"""How far ahead the cut is set, at the pace of the fastest rank: all must hear of it before they come there."""
_MOVE_S = 0.12
"""Ranks that have not all begun a collective for this long are stuck, or do not communicate."""
_LIMIT_S = 0.6
"""Ranks that have not stopped at the cut after this long will not."""


class ConsistentCut:
    """Reads how many collectives of the default group each rank has begun until all have moved on, then sets the stop.

    Args:
        client: The cluster's client.
        ranks: The ranks that run the cell, in the whole world's number: a cut of some ranks is none.
        now: The time.
    """

    def __init__(self, client: RankClient, ranks: Sequence[int], now: float) -> None:
        self._client = client
        self._ranks = list(ranks)
        self._began = now
        self._looks: list[tuple[float, dict[int, int]]] = []
        self._asked: dict[int, Any] = {}
        self._set = False
        self._look(now)

    def _look(self, now: float) -> None:
        self._asked_at = now
        self._asked = {rank: self._client.request(rank, "axon_waits") for rank in self._ranks}

    def step(self, now: float) -> bool:
        """Do what is due; True when ranks must be ended the hard way: a cut is not possible, or it did not work."""
        if self._set:
            return now - self._began > _LIMIT_S
        if self._asked and all(future.done() for future in self._asked.values()):
            self._looks.append((self._asked_at, {rank: _count(future) for rank, future in self._asked.items()}))
            self._asked = {}
            if len(self._looks) > 1 and self._all_moved():
                self._set_stop()
                return False
        if now - self._began > _MOVE_S:
            return True
        if not self._asked and now - self._asked_at >= _LOOK_S:
            self._look(now)
        return False

    def _all_moved(self) -> bool:
        first, last = self._looks[0][1], self._looks[-1][1]
        return all(last[rank] > first[rank] for rank in self._ranks)

    def _set_stop(self) -> None:
        (before, first), (after, last) = self._looks[0], self._looks[-1]
        pace = max(last[rank] - first[rank] for rank in self._ranks) / max(after - before, 1e-3)
        at = max(last.values()) + max(2, int(pace * _AHEAD_S))
        for rank in self._ranks:
            self._client.request(rank, "axon_stop", at=at)
        self._set = True


def _count(future: Any) -> int:
    return int(future.result()["content"].get("counts", {}).get("0", 0))
