"""Ranks that do not reply while others wait for them: the sentence about where they are.

A rank that is stopped, or in C code that holds the GIL, cannot report what it is doing. Over shared memory, ranks that
wait for it read its last call from there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import format_seconds
from axon_nb.records.waits.calls import RankWaits


@dataclass(frozen=True, slots=True)
class PeerCall:
    """What a rank sees of another one that it waits for."""

    rank: int
    """Global rank of the other one."""
    operation: str
    """Its last collective in the group, such as ``all_reduce``; empty: it has made none."""
    line: int
    """Line of the cell that made this call; 0: unknown."""
    is_waiting: bool
    """Whether it waits in this call."""
    is_stopped: bool
    """Whether its process is stopped."""

    def __str__(self) -> str:
        state = "stopped" if self.is_stopped else "does not reply"
        if not self.operation:
            return state
        if not self.is_waiting:  # the line may be one of an earlier cell
            return f"{state}; its last call was {self.operation}"
        place = f"in {self.operation}{f' at line {self.line}' if self.line else ''}"
        return f"{state} {place}" if self.is_stopped else f"{state}; it is {place}"


def describe_silent_ranks(
    reports: Mapping[int, RankWaits],
    peers: Mapping[int, Sequence[PeerCall]],
    silent: Collection[int],
    after_s: float,
) -> str:
    """Return a line such as ``Waiting for rank 1 (stopped): ranks 0,2 have been in all_reduce at line 4 for 3.2 s``.

    Args:
        reports: The reports of the ranks that reply, all taken at the same time.
        peers: What each of them sees of the ranks that it waits for.
        silent: The ranks that do not reply.
        after_s: Minimum waiting time of a call to be considered, in seconds.

    Returns:
        The line, or an empty string if no rank is known to have waited that long for a silent one.
    """
    waiting: dict[tuple[PeerCall, str], dict[int, float]] = {}
    for rank, report in sorted(reports.items()):
        call = report.blocked_in
        if call is None or call.seconds < after_s:
            continue
        for peer in peers.get(rank, ()):
            if peer.rank in silent:
                waiting.setdefault((peer, report.place), {})[rank] = call.seconds
    if not waiting:
        return ""
    (peer, place), ranks = max(waiting.items(), key=lambda item: (len(item[1]), -item[0][0].rank))
    verb = "has" if len(ranks) == 1 else "have"
    return (
        f"Waiting for rank {peer.rank} ({peer}): {name_ranks(ranks)} {verb} been in {place} for "
        f"{format_seconds(max(ranks.values()))}"
    )
