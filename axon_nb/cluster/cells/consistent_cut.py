"""An interrupt as a consistent cut: every rank stops before the same collective, so that none is a step ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from axon_nb.cluster.rpc.answers import Answer
from axon_nb.cluster.rpc.client import RankClient
from axon_nb.records.protocol.aborts import StopRequest
from axon_nb.records.protocol.inspection import WaitsReply, WaitsRequest

Counts = dict[str, int]

_POLL_INTERVAL_S = 0.015
_LEAD_TIME_S = 0.04
"""How far ahead the cut is set, at the pace of the fastest rank: all must know of it before they get there."""
_PROGRESS_TIMEOUT_S = 0.12
"""Ranks that have not all started a collective for this long are stuck, or do not communicate."""
_STOP_TIMEOUT_S = 0.4
"""Ranks that have not stopped at the cut after this long will not."""


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
            counts = {rank: _counts(future) for rank, future in self._requests.items()}
            self._observations.append((self._requested_at, counts))
            self._requests = {}
            if len(self._observations) > 1:
                group = progressing_group(self._observations[0][1], self._observations[-1][1])
                if group is not None:
                    self._set_stop(group)
                    return False
        if now - self._started_at > _PROGRESS_TIMEOUT_S:
            return True
        if not self._requests and now - self._requested_at >= _POLL_INTERVAL_S:
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


def _counts(answer: Answer[WaitsReply]) -> Counts:
    reply = answer.reply()
    return {"": 0} if reply is None else {**reply.waits.counts, "": reply.collectives}
