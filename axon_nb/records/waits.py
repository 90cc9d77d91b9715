"""Who waits for whom: what a rank tells of its communication calls, and what follows for all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from axon_nb.records.advice import advice_for
from axon_nb.records.ranks import format_ranks

__all__ = ["PendingCall", "RankWaits", "awaited", "explain", "named"]

_SAME_SIZE = frozenset({"allreduce", "broadcast", "reduce"})
_THREADS_S = 30.0
"""For so long a rank on which a thread of the user's runs may still come, whatever its main thread does."""


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A communication call that has begun and not ended."""

    number: int
    """Running number on its rank."""
    name: str
    """Operation of the group, such as ``allreduce``."""
    group: str
    """Name of the process group."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    sequence: int
    """How many collectives this rank has begun in the group, this one included; 0 for send and recv."""
    peer: int
    """Global rank of the other side of a send or recv; -1 otherwise, or when any rank may be it."""
    bytes: int
    """Payload on this rank."""
    seconds: float
    """How long it has been going on."""


@dataclass(frozen=True, slots=True)
class RankWaits:
    """What one rank waits in."""

    rank: int
    running: bool
    """Whether it runs a cell."""
    line: int | None
    """Line of the cell, counted with the magic's line as the first."""
    call: str
    """The function of torch.distributed that the main thread is in; empty when it is in none."""
    pending: tuple[PendingCall, ...]
    """Oldest first."""
    counts: Mapping[str, int]
    """Collectives begun so far, by group."""
    via: str = ""
    """The function that communicates though its name does not say so, such as ``full_tensor``; empty for others."""
    waited: int = 0
    """Number of the call that the main thread waits for; 0 when it is not known."""
    threads: tuple[str, ...] = ()
    """Names of the threads that the user has started and that still run: they may communicate, too."""

    @property
    def blocked_in(self) -> PendingCall | None:
        """The call that the rank cannot pass; None while its main thread is in no communication."""
        if not (self.running and self.call and self.pending):
            return None
        return next((call for call in self.pending if call.number == self.waited), self.pending[0])

    @property
    def place(self) -> str:
        """``all_reduce at line 4``."""
        return f"{self.via or self.call}{f' at line {self.line}' if self.line else ''}"


def _missing(own: RankWaits, call: PendingCall, reports: Mapping[int, RankWaits]) -> set[int]:
    """The ranks that have not come to `call`."""
    if call.sequence == 0:
        other = reports.get(call.peer)
        if other is None:  # from any rank, or one that does not answer
            return set()
        # A send is over when it is received: Gloo keeps no message for a receiver that comes later.
        names, peers = (("recv", "recv_anysource"), (own.rank, -1)) if call.name == "send" else (("send",), (own.rank,))
        return set() if any(c.name in names and c.peer in peers for c in other.pending) else {call.peer}
    others = (rank for rank in call.ranks if rank != own.rank and rank in reports)
    return {rank for rank in others if reports[rank].counts.get(call.group, 0) < call.sequence}


def awaited(reports: Mapping[int, RankWaits], after_s: float) -> dict[int, tuple[int, ...]]:
    """For each rank that has waited for at least `after_s` seconds, the ranks that have not come to its call."""
    blocked = {rank: call for rank, own in reports.items() if (call := own.blocked_in) and call.seconds >= after_s}
    missing = {rank: tuple(sorted(_missing(reports[rank], call, reports))) for rank, call in blocked.items()}
    return {rank: others for rank, others in missing.items() if others}


def explain(reports: Mapping[int, RankWaits], cell_ranks: Collection[int], after_s: float) -> str | None:
    """Why the cell cannot end by itself; None when it can, or when that is not proven.

    A rank is hopeless when it waits for one that is not running the cell (any more), or for one that is hopeless
    itself; a merely slow rank makes nobody hopeless, nor, for 30 s, one on which a thread of the user's runs.

    Args:
        reports: What each rank says, all asked at the same time.
        cell_ranks: The ranks that the cell was sent to.
        after_s: How long a call must have been waited for, in seconds.
    """
    blocked = {rank: call for rank, own in reports.items() if (call := own.blocked_in) and call.seconds >= after_s}
    if (mismatch := _mismatch(blocked, reports)) is not None:
        return mismatch + advice_for(reports[rank].via for rank in blocked)
    threaded = {rank for rank, own in reports.items() if own.threads}
    missing = {
        rank: _missing(reports[rank], call, reports) - (threaded if call.seconds < _THREADS_S else set())
        for rank, call in blocked.items()
    }
    finished = {rank for rank, own in reports.items() if not own.running}
    hopeless = set(blocked)
    while True:
        left = {rank for rank in hopeless if missing[rank] & (finished | hopeless)}
        if left == hopeless:
            break
        hopeless = left
    if not hopeless:
        return None
    waits = {rank: missing[rank] & (finished | hopeless) for rank in hopeless}
    return _sentence(waits, reports, finished, cell_ranks) + advice_for(reports[rank].via for rank in sorted(hopeless))


def _mismatch(blocked: Mapping[int, PendingCall], reports: Mapping[int, RankWaits]) -> str | None:
    for rank, call in blocked.items():
        for other, theirs in blocked.items():
            if other <= rank or call.sequence == 0 or (theirs.group, theirs.sequence) != (call.group, call.sequence):
                continue
            here, there = reports[rank].place, reports[other].place
            if theirs.name != call.name:
                return (
                    f"The ranks do not meet: rank {rank} is in {here}, rank {other} in {there}, "
                    "as the same call of one group."
                )
            if call.name in _SAME_SIZE and theirs.bytes != call.bytes:
                return (
                    f"The sizes differ: rank {rank} brings {call.bytes:,} bytes to {here}, "
                    f"rank {other} {theirs.bytes:,} bytes to {there}."
                )
    return None


def _sentence(
    waits: Mapping[int, set[int]],
    reports: Mapping[int, RankWaits],
    finished: Collection[int],
    cell_ranks: Collection[int],
) -> str:
    grouped: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, others in sorted(waits.items()):
        grouped.setdefault((reports[rank].place, tuple(sorted(others))), []).append(rank)
    parts = []
    for (place, awaited), ranks in grouped.items():
        verb = "waits" if len(ranks) == 1 else "wait"
        parts.append(f"{named(ranks)} {verb} in {place} for {named(awaited)}{_why(awaited, finished, cell_ranks)}")
    return "; ".join(parts) + "."


def named(ranks: Collection[int]) -> str:
    """``rank 2`` or ``ranks 0-1,3``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"


def _why(ranks: Collection[int], finished: Collection[int], cell_ranks: Collection[int]) -> str:
    if not set(ranks) <= set(finished):
        return ""
    verb = ("has", "does") if len(ranks) == 1 else ("have", "do")
    if set(ranks) <= set(cell_ranks):
        return f", which {verb[0]} finished the cell"
    return f", which {verb[1]} not run this cell" if not set(ranks) & set(cell_ranks) else ""
