"""Slow ranks, which are no deadlock: who is waited for, where they are, and who waits for how long."""

from __future__ import annotations

from collections.abc import Mapping

from axon_nb.records.waits import RankWaits, awaited, named

__all__ = ["slow_sentence"]


def slow_sentence(reports: Mapping[int, RankWaits], after_s: float) -> str:
    """One line such as ``Waiting for rank 1 (line 7): ranks 0,2-3 have been in all_reduce at line 4 for 3.2 s``.

    Those who wait for the rank at the bottom come first: ranks that themselves wait for others are not what is waited
    for, unless all do.

    Args:
        reports: What each rank says, all asked at the same time.
        after_s: How long a call must have been waited for, in seconds.

    Returns:
        The line, empty when nobody is waited for that long.
    """
    waits = awaited(reports, after_s)
    ends = {rank: tuple(other for other in others if other not in waits) for rank, others in waits.items()}
    groups: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for rank, others in sorted(ends.items()):
        if others:
            groups.setdefault((others, reports[rank].place), []).append(rank)
    if not groups:
        return ""
    (others, place), ranks = max(groups.items(), key=lambda item: (len(item[1]), -item[1][0]))
    seconds = max(call.seconds for rank in ranks if (call := reports[rank].blocked_in))
    verb = "has" if len(ranks) == 1 else "have"
    took = f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whom = f"{named(others)}{_where([reports[rank] for rank in others])}"
    return f"Waiting for {whom}: {named(ranks)} {verb} been in {place} for {took}"


def _where(late: list[RankWaits]) -> str:
    places = {own.place if own.call else f"line {own.line}" for own in late if own.running and own.line}
    if len(places) == 1 and all(own.running for own in late):
        return f" ({places.pop()})"
    return ""
