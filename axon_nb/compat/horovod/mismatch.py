"""What is wrong between ranks, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from axon_nb.records.ranks import format_ranks

__all__ = ["Call", "differing", "nobody_goes_on", "without_the_joined"]

Call = tuple[str, str, str]
"""Kind and name of a call, and what it brings."""


def differing(ranks: Sequence[int], calls: Sequence[Call | None]) -> str | None:
    """The sentence on the first rank that brings something else than the first one; None: all bring the same.

    Args:
        ranks: Global ranks of the members.
        calls: What each of them calls; None: it has joined.
    """
    there = [(rank, call) for rank, call in zip(ranks, calls, strict=True) if call is not None]
    first_rank, first = there[0]
    for rank, call in there:
        if call[2] != first[2]:
            return (
                f"{_named(first)}: rank {first_rank} brings {first[2]}, rank {rank} brings {call[2]}; every rank "
                "brings the same to a collective of one name."
            )
    return None


def without_the_joined(ranks: Sequence[int], calls: Sequence[Call | None]) -> str:
    """The sentence on a collective that ranks that have joined cannot take part in."""
    call = next(call for call in calls if call is not None)
    joined = [rank for rank, theirs in zip(ranks, calls, strict=True) if theirs is None]
    who = f"{'rank' if len(joined) == 1 else 'ranks'} {format_ranks(joined)}"
    return (
        f"{_named(call)}: {who} called hvd.join(), and only allreduce goes on with ranks that have joined; give every "
        "rank as many batches, or use hvd.allreduce."
    )


def nobody_goes_on(ranks: Sequence[int], waiting: Sequence[Sequence[tuple[str, str]]]) -> str:
    """The sentence on ranks that all wait.

    Args:
        ranks: Global ranks of the members.
        waiting: Kind and name of the calls that each of them has made and that are not complete.
    """
    parts = []
    for rank, calls in zip(ranks, waiting, strict=True):
        if not calls:
            parts.append(f"rank {rank} has joined")
            continue
        call = calls[0]
        absent = [other for other, theirs in zip(ranks, waiting, strict=True) if theirs and call not in theirs]
        who = f", which {'rank' if len(absent) == 1 else 'ranks'} {format_ranks(absent)} did not call"
        parts.append(f"rank {rank} waits in {_named(call)}{who if absent else ''}")
    return f"No rank can go on: {'; '.join(parts)}. Every rank makes the same calls, by the same names."


def _named(call: Sequence[str]) -> str:
    kind, name = call[:2]
    return f"hvd.{kind}" if name.startswith("noname.") else f"hvd.{kind} {name!r}"
