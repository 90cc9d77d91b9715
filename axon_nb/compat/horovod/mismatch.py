"""Messages about mismatching calls between ranks."""

from __future__ import annotations

from collections.abc import Sequence

from axon_nb.records.ranks import name_ranks

__all__ = ["Call", "deadlock_message", "differing", "join_mismatch"]

Call = tuple[str, str, str]
"""Kind and name of a call, and a description of its arguments."""


def differing(ranks: Sequence[int], calls: Sequence[Call | None]) -> str | None:
    """Describe the first rank whose arguments differ from the first rank's; None if all match.

    Args:
        ranks: Global ranks of the members.
        calls: The call of each; None if it has joined.
    """
    there = [(rank, call) for rank, call in zip(ranks, calls, strict=True) if call is not None]
    first_rank, first = there[0]
    for rank, call in there:
        if call[2] != first[2]:
            return (
                f"{_named(first)}: rank {first_rank} passed {first[2]}, rank {rank} passed {call[2]}; arguments of "
                "collectives with the same name must match."
            )
    return None


def join_mismatch(ranks: Sequence[int], calls: Sequence[Call | None]) -> str:
    """Describe a collective in which joined ranks cannot take part."""
    call = next(call for call in calls if call is not None)
    joined = [rank for rank, theirs in zip(ranks, calls, strict=True) if theirs is None]
    who = name_ranks(joined)
    return (
        f"{_named(call)}: {who} called hvd.join(), and only allreduce works with joined ranks; give every rank the "
        "same number of batches, or use hvd.allreduce."
    )


def deadlock_message(ranks: Sequence[int], waiting: Sequence[Sequence[tuple[str, str]]]) -> str:
    """Describe a deadlock in which all ranks wait.

    Args:
        ranks: Global ranks of the members.
        waiting: Kind and name of the incomplete calls of each.
    """
    parts = []
    for rank, calls in zip(ranks, waiting, strict=True):
        if not calls:
            parts.append(f"rank {rank} has joined")
            continue
        call = calls[0]
        absent = [other for other, theirs in zip(ranks, waiting, strict=True) if theirs and call not in theirs]
        who = f", which {name_ranks(absent)} did not call"
        parts.append(f"rank {rank} waits in {_named(call)}{who if absent else ''}")
    return f"Deadlock: {'; '.join(parts)}. Every rank must make the same calls with the same names."


def _named(call: Sequence[str]) -> str:
    kind, name = call[:2]
    return f"hvd.{kind}" if name.startswith("noname.") else f"hvd.{kind} {name!r}"
