"""Communication calls in progress, as each rank reports them, and which ranks a call waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SAME_SIZE_CALLS = frozenset({"allreduce", "broadcast", "reduce"})
"""Collectives to which each rank passes as much as the others."""


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A communication call in progress."""

    number: int
    """Sequence number on its rank."""
    name: str
    """Operation of the group, such as ``allreduce``."""
    group: str
    """Name of the process group."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    sequence: int
    """Number of collectives started by this rank in the group, including this one; 0 for send and recv."""
    peer: int
    """Global rank of a send's or recv's peer; -1 for collectives and for a recv from any rank."""
    bytes: int
    """Payload on this rank."""
    seconds: float
    """How long it has been in progress."""


@dataclass(frozen=True, slots=True)
class RankWaits:
    """What one rank is waiting for."""

    rank: int
    running: bool
    """Whether it is running a cell."""
    line: int | None
    """Line of the cell; the magic's line is line 1."""
    call: str
    """The torch.distributed function that the main thread is in; empty if none."""
    pending: tuple[PendingCall, ...]
    """Calls in progress, oldest first."""
    counts: Mapping[str, int]
    """Number of collectives started so far, by group."""
    via: str = ""
    """The function that communicates implicitly, such as ``full_tensor``; otherwise empty."""
    waited: int = 0
    """Number of the call that the main thread waits for; 0 if unknown."""
    threads: tuple[str, ...] = ()
    """Names of running threads that the user started: they may communicate too."""
    within: str = ""
    """The user's innermost function, such as `` (step, line 3)``; empty if that is the cell itself."""

    @property
    def blocked_in(self) -> PendingCall | None:
        """The call that blocks the rank; None if its main thread is not communicating."""
        if not (self.running and self.call and self.pending):
            return None
        return next((call for call in self.pending if call.number == self.waited), self.pending[0])

    @property
    def place(self) -> str:
        """Call and line, such as ``all_reduce at line 4 (step, train.py line 40)``."""
        return f"{self.via or self.call}{f' at line {self.line}{self.within}' if self.line else ''}"


@dataclass(frozen=True, slots=True)
class GroupWaits:
    """The communication calls in progress on one rank."""

    pending: tuple[PendingCall, ...]
    counts: Mapping[str, int]
    """Collectives started, by group."""
    collectives: int = 0
    """Collectives that the cell started, over all groups."""
    call: str = ""
    """The call that the main thread is in, if its stack does not show it; else empty."""
    started: tuple[PendingCall, ...] = ()
    """Collectives that a GPU has in progress, the oldest ones, wherever the main thread is."""


class Arrivals:
    """Which ranks have reached the calls that others wait in; a collective is looked at once, not for each rank in it.

    Args:
        reports: The report of each rank.
    """

    def __init__(self, reports: Mapping[int, RankWaits]) -> None:
        self._reports = reports
        self._late: dict[tuple[str, int], frozenset[int]] = {}

    def missing(self, waiting: RankWaits, call: PendingCall) -> frozenset[int]:
        """Return the ranks that have not reached a call; ranks that wait in one collective get the same object.

        Args:
            waiting: The rank that waits.
            call: Its call.
        """
        if call.sequence == 0:
            return self._missing_peer(waiting, call)
        key = call.group, call.sequence
        if key not in self._late:
            there = (self._reports[rank] for rank in call.ranks if rank in self._reports)
            late = (report.rank for report in there if report.counts.get(call.group, 0) < call.sequence)
            self._late[key] = frozenset(late)
        late_ranks = self._late[key]
        return late_ranks - {waiting.rank} if waiting.rank in late_ranks else late_ranks

    def _missing_peer(self, waiting: RankWaits, call: PendingCall) -> frozenset[int]:
        other = self._reports.get(call.peer)
        if other is None:  # a recv from any rank, or the peer did not respond
            return frozenset()
        # A send finishes when it is received: Gloo does not buffer messages for a late receiver.
        names, peers = (
            (("recv", "recv_anysource"), (waiting.rank, -1)) if call.name == "send" else (("send",), (waiting.rank,))
        )
        has_arrived = any(one.name in names and one.peer in peers for one in other.pending)
        return frozenset() if has_arrived else frozenset({call.peer})


def missing_ranks(reports: Mapping[int, RankWaits], after_s: float) -> dict[int, tuple[int, ...]]:
    """For each rank that has waited at least `after_s` seconds: the ranks that have not reached its call."""
    arrivals = Arrivals(reports)
    in_order: dict[frozenset[int], tuple[int, ...]] = {}
    missing = {}
    for rank, state in reports.items():
        if (call := state.blocked_in) and call.seconds >= after_s and (others := arrivals.missing(state, call)):
            if others not in in_order:
                in_order[others] = tuple(sorted(others))
            missing[rank] = in_order[others]
    return missing
