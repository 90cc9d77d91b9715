"""Slow ranks, which are not a deadlock: where they are, and who has waited for them how long."""

from __future__ import annotations

from collections.abc import Mapping

from axon_nb.records.ranks import name_ranks
from axon_nb.records.waits.calls import RankWaits, missing_ranks


def describe_slow_ranks(reports: Mapping[int, RankWaits], after_s: float) -> str:
    """Return a line such as ``Waiting for rank 1 (line 7): ranks 0,2-3 have been in all_reduce at line 4 for 3.2 s``.

    Names the root of the wait: ranks that wait for others themselves are not named as slow, unless all do.

    Args:
        reports: The report of each rank, all taken at the same time.
        after_s: Minimum waiting time of a call to be considered, in seconds.

    Returns:
        The line, or an empty string if no rank has waited that long.
    """
    waits = missing_ranks(reports, after_s)
    ends = {others: tuple(other for other in others if other not in waits) for others in set(waits.values())}
    groups: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for rank, others in sorted(waits.items()):
        if ends[others]:
            groups.setdefault((ends[others], reports[rank].place), []).append(rank)
    if not groups:
        return ""
    (others, place), ranks = max(groups.items(), key=lambda item: (len(item[1]), -item[1][0]))
    seconds = max(call.seconds for rank in ranks if (call := reports[rank].blocked_in))
    verb = "has" if len(ranks) == 1 else "have"
    took = f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whom = f"{name_ranks(others)}{_where([reports[rank] for rank in others])}"
    return f"Waiting for {whom}: {name_ranks(ranks)} {verb} been in {place} for {took}"


def _where(late: list[RankWaits]) -> str:
    places = {state.place if state.call else f"line {state.line}" for state in late if state.running and state.line}
    return f" ({places.pop()})" if len(places) == 1 and all(state.running for state in late) else ""
