"""Compares the digests of ranks while a cell runs, and decides whether it must stop."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from axon_nb.cluster.divergence.verdict import (
    NumbersFinding,
    NumbersVerdict,
    find_difference,
    find_non_finite,
    is_before,
)
from axon_nb.cluster.rpc.answers import Answer
from axon_nb.cluster.rpc.client import RankClient
from axon_nb.cluster.rpc.requests import request_each
from axon_nb.records.protocol.contents import NumbersReply, NumbersRequest
from axon_nb.records.ranks import unpack_ranks
from axon_nb.records.training.numbers import LAST, NonFinite

_POLL_INTERVAL_S = 0.2
_SOON_S = 0.02
"""The interval once something is wrong, until all ranks have said what they see."""
_REPLY_TIMEOUT_S = 2.0
_OTHERS_TIMEOUT_S = 1.0
"""How long to wait for the other ranks to reach a step in which something is wrong."""
_REPEAT_TIMEOUT_S = 15.0
"""How long the ranks may take to repeat a forward."""
_MAX_PENDING = 20_000
"""Digests that wait for those of other ranks; the oldest are dropped."""
Key = tuple[int, int, tuple[int, ...]]
"""The step, the optimizer, and the ranks that hold the same."""


class DivergenceWatch:
    """Compares the ranks of one cell.

    Args:
        client: The cluster's client.
        run: Id of the cell's run.
        ranks: The ranks that run it.
        stops: Whether the cell ends where something is wrong.
        quiet: Whether nothing is shown while it runs.
    """

    def __init__(self, client: RankClient, run: str, ranks: Sequence[int], *, stops: bool, quiet: bool = False) -> None:
        self._client = client
        self.can_undo = False
        """Whether the cell can be taken back."""
        self._run, self._ranks = run, tuple(ranks)
        self.stops, self._quiet = stops, quiet
        self._next_poll = 0.0
        self._requests: dict[int, Answer[NumbersReply]] = {}
        self._requested_at = 0.0
        self._read: dict[int, int] = dict.fromkeys(ranks, 0)
        """By rank, the number of the next row."""
        self._pending: dict[Key, dict[int, tuple[int, int]]] = {}
        self._steps: dict[int, int] = dict.fromkeys(ranks, 0)
        self._reached: dict[int, tuple[float, int]] = {}
        """By rank, the last step and optimizer that it has made."""
        self._compared = self._lost = 0
        self._wrong: Key | None = None
        """The first step with different digests."""
        self._non_finite: dict[int, NonFinite] = {}
        self._suspected_at: float | None = None
        self._waiting: dict[int, str] = {}
        """By rank, as in `NumbersReply`."""
        self._repeated_at: float | None = None
        """When the ranks were asked to repeat a forward together; None: they were not."""
        self._finding: NumbersFinding | None = None

    def step(self, now: float) -> str:
        """Do what is due; return why the cell must stop, if it must, else an empty text.

        Args:
            now: The time.
        """
        if self._requests:
            if all(answer.done() for answer in self._requests.values()) or now - self._requested_at > _REPLY_TIMEOUT_S:
                replies = {rank: answer.reply() for rank, answer in self._requests.items()}
                self._requests = {}
                self._take({rank: reply for rank, reply in replies.items() if reply is not None})
        elif now >= self._next_poll:
            suspects = self._suspected_at is not None and self._finding is None
            self._next_poll, self._requested_at = now + (_SOON_S if suspects else _POLL_INTERVAL_S), now
            for rank in self._ranks:
                with contextlib.suppress(KeyError):  # it has just died
                    request = NumbersRequest(self._run, self._read[rank], repeat=self._repeated_at is not None)
                    self._requests[rank] = self._client.request(rank, request)
        if self._finding is None and self._is_wrong:
            if self._suspected_at is None:
                self._suspected_at = self._next_poll = now
            if self._is_settled(now, self._suspected_at):
                self._finding = self._find()
                if self._finding is not None and not self.stops and not self._quiet:
                    print(self._finding.claim, file=sys.stderr)
        return str(self._finding) if self.stops and self._finding is not None else ""

    def _is_settled(self, now: float, since: float) -> bool:
        """Whether the ranks have said all that they can; has them repeat a forward if all wait for that."""
        if self._repeated_at is not None:
            is_over = set(self._waiting.values()) == {"repeated"}
            return is_over or now - self._repeated_at > _REPEAT_TIMEOUT_S
        if now - since > _OTHERS_TIMEOUT_S:
            return True
        states = [self._waiting.get(rank, "") for rank in self._ranks]
        if self.stops and all(state == "ready" for state in states):
            self._repeated_at = now
            return False
        return self._have_all_reached() and not (self.stops and "ready" in states)

    @property
    def _is_wrong(self) -> bool:
        return self._wrong is not None or bool(self._non_finite)

    def finish(self) -> NumbersVerdict:
        """Return the verdict when the cell is over; asks the ranks for the rest."""
        self._requests = {}
        requests = {rank: NumbersRequest(self._run, since) for rank, since in self._read.items()}
        self._take(request_each(self._client, requests, timeout_s=_REPLY_TIMEOUT_S))
        if self._finding is None and self._is_wrong:
            self._finding = self._find()
        return NumbersVerdict(self._finding, max(self._steps.values()), self._ranks, self._compared, self._lost)

    def _take(self, replies: dict[int, NumbersReply]) -> None:
        for rank, reply in replies.items():
            sets = {
                int(optimizer): [unpack_ranks(tuple(map(tuple, runs))) for runs in sets]
                for optimizer, sets in reply.sets.items()
            }
            self._read[rank] = reply.next
            self._lost += reply.lost
            self._waiting[rank] = reply.waiting
            if reply.non_finite is not None:
                self._non_finite[rank] = reply.non_finite
            for row in reply.rows:
                self._take_row(rank, row, sets[row[0]])

    def _take_row(self, rank: int, row: Sequence[Any], sets: Sequence[tuple[int, ...]]) -> None:
        optimizer, step, *digests = row
        order = _order(step)
        self._steps[rank] += step != LAST
        self._reached[rank] = order, optimizer
        for index, members in enumerate(sets):
            expected = [member for member in members if member in self._ranks]
            if len(expected) < 2:
                continue
            key = step, optimizer, members
            seen = self._pending.setdefault(key, {})
            seen[rank] = digests[2 * index], digests[2 * index + 1]
            if len(set(seen.values())) > 1:
                if self._wrong is None or (order, optimizer) < (_order(self._wrong[0]), self._wrong[1]):
                    self._wrong = key
            elif len(seen) == len(expected):
                self._compared += 1
                del self._pending[key]
        while len(self._pending) > _MAX_PENDING:
            self._pending.pop(next(iter(self._pending)))

    def _have_all_reached(self) -> bool:
        """Whether no rank can report anything of an earlier step any more."""
        at = [(_order(one.step), one.optimizer) for one in self._non_finite.values()]
        if self._wrong is not None:
            at.append((_order(self._wrong[0]), self._wrong[1]))
        return all(self._reached.get(rank, (-1, 0)) >= min(at) for rank in self._ranks)

    def _find(self) -> NumbersFinding | None:
        non_finite = find_non_finite(self._non_finite) if self._non_finite else None
        difference = None
        if self._wrong is not None:
            step, optimizer, _ = self._wrong
            at = optimizer, step
            requests = {rank: NumbersRequest(self._run, since, at) for rank, since in self._read.items()}
            replies = request_each(self._client, requests, timeout_s=_REPLY_TIMEOUT_S)
            details = {rank: reply.details for rank, reply in replies.items() if reply.details is not None}
            difference = find_difference(details, can_undo=self.can_undo) if details else None
            if difference is None:  # a rank had dropped it, or is gone
                self._wrong, self._lost = None, self._lost + 1
        if difference is None or non_finite is None:
            return difference or non_finite
        return difference if is_before(difference, non_finite) else non_finite


def _order(step: int) -> float:
    return float("inf") if step == LAST else step
