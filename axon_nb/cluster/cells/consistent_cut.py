"""An interrupt as a consistent cut: every rank stops before the same collective, so that none is a step ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from axon_nb.cluster.rpc.answers import Answer
from axon_nb.cluster.rpc.client import RankClient
from axon_nb.records.protocol.cells import StopRequest
from axon_nb.records.protocol.inspection import WaitsReply, WaitsRequest

__all__ = ["ConsistentCut", "moving_group", "place_of_cut"]

Counts = dict[str, int]

_LOOK_S = 0.015
_AHEAD_S = 0.04
"""How far ahead the cut is set, at the pace of the fastest rank: all must hear of it before they come there."""
_MOVE_S = 0.12
"""Ranks that have not all begun a collective for this long are stuck, or do not communicate."""
_LIMIT_S = 0.4
"""Ranks that have not stopped at the cut after this long will not."""


class ConsistentCut:
    """Reads how many collectives each rank has begun until all have moved on, then sets the stop.

    The stop is a number of collectives of a group that all ranks are in and move on in. Where there is none, as with
    tensor parallelism next to data parallelism, it is a number of collectives of all groups together: then ranks that
    run the same program stop at the same place, and others are ended the hard way when the time is over.

    Args:
        client: The cluster's client.
        ranks: The ranks that run the cell, in the whole world's number: a cut of some ranks is none.
        now: The time.
    """

    def __init__(self, client: RankClient, ranks: Sequence[int], now: float) -> None:
        self._client = client
        self._ranks = list(ranks)
        self._began = now
        self._looks: list[tuple[float, dict[int, Counts]]] = []
        self._asked: dict[int, Answer[WaitsReply]] = {}
        self._set = False
        self._look(now)

    def _look(self, now: float) -> None:
        self._asked_at = now
        self._asked = {rank: self._client.request(rank, WaitsRequest()) for rank in self._ranks}

    def step(self, now: float) -> bool:
        """Do what is due; True when ranks must be ended the hard way: a cut is not possible, or it did not work."""
        if self._set:
            return now - self._began > _LIMIT_S
        if self._asked and all(future.done() for future in self._asked.values()):
            self._looks.append((self._asked_at, {rank: _counts(future) for rank, future in self._asked.items()}))
            self._asked = {}
            if len(self._looks) > 1 and (group := moving_group(self._looks[0][1], self._looks[-1][1])) is not None:
                self._set_stop(group)
                return False
        if now - self._began > _MOVE_S:
            return True
        if not self._asked and now - self._asked_at >= _LOOK_S:
            self._look(now)
        return False

    def _set_stop(self, group: str) -> None:
        (before, first), (after, last) = self._looks[0], self._looks[-1]
        at = place_of_cut(group, first, last, seconds=after - before)
        for rank in self._ranks:
            self._client.request(rank, StopRequest(group, at))
        self._set = True


def moving_group(first: Mapping[int, Counts], last: Mapping[int, Counts]) -> str | None:
    """The group to cut in: one that all ranks have moved on in, the busiest; "" for all groups together; None: none.

    Args:
        first: Collectives begun by rank and group, and under "" in the cell in all groups together.
        last: The same, later.
    """
    moved = {
        group: min(counts[group] - first[rank].get(group, 0) for rank, counts in last.items())
        for group in set.intersection(*(set(counts) for counts in last.values()))
    }
    together = moved.pop("", 0)
    busiest = max(sorted(moved), key=lambda group: moved[group], default="")
    if busiest and moved[busiest] > 0:
        return busiest
    return "" if together > 0 else None


def place_of_cut(group: str, first: Mapping[int, Counts], last: Mapping[int, Counts], *, seconds: float) -> int:
    """The number of the group's collective that no rank begins: as far ahead as ranks need to hear of it.

    Args:
        group: See `moving_group`; it may have been made since the first look.
        first: Collectives begun by rank and group.
        last: The same, `seconds` later.
        seconds: Between the looks.
    """
    moved = max(counts[group] - first[rank].get(group, 0) for rank, counts in last.items())
    return max(counts[group] for counts in last.values()) + max(2, int(moved / max(seconds, 1e-3) * _AHEAD_S))


def _counts(answer: Answer[WaitsReply]) -> Counts:
    reply = answer.reply()
    return {"": 0} if reply is None else {**reply.waits.counts, "": reply.collectives}
