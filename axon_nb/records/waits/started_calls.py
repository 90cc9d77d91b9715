"""Collectives that ranks have started on a GPU: what shows, wherever the ranks wait, that they cannot end well.

On NCCL the host only starts an operation, and may wait for it anywhere, as in `.item()`. No stack shows that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from axon_nb.records.ranks import name_ranks
from axon_nb.records.waits.calls import SAME_SIZE_CALLS, PendingCall
from axon_nb.records.waits.functions import PUBLIC_NAMES

Started = Mapping[int, Sequence[PendingCall]]
"""The collectives in progress by rank, oldest first."""


def explain_mismatch(started: Started) -> str:
    """Return which ranks started different collectives, or passed different sizes, at one place of a group's order.

    Whatever the GPUs make of them is wrong: they hang, or mix the values. Empty if no two ranks differ.
    """
    first: dict[tuple[str, int], tuple[int, PendingCall]] = {}
    for rank, calls in sorted(started.items()):
        for call in calls:
            other, theirs = first.setdefault((call.group, call.sequence), (rank, call))
            name, their_name = _name(call), _name(theirs)
            if call.name != theirs.name:
                return f"Collective mismatch: rank {other} started {their_name}, rank {rank} {name}, on the same group."
            if call.name in SAME_SIZE_CALLS and call.bytes != theirs.bytes:
                return (
                    f"Size mismatch in {name}: rank {other} passed {theirs.bytes:,} bytes, rank {rank} {call.bytes:,}."
                )
    return ""


def describe_absent_ranks(started: Started, cell_ranks: Collection[int], after_s: float) -> str:
    """Return a line on a collective that needs ranks which do not run this cell; empty if there is none.

    It is not an error: a later cell may start it on the other ranks.

    Args:
        started: The collectives in progress.
        cell_ranks: The ranks that the cell was sent to.
        after_s: How long a collective must have been in progress, in seconds.
    """
    for rank in sorted(set(started) & set(cell_ranks)):
        for call in started[rank]:
            if call.seconds >= after_s and (absent := set(call.ranks) - set(cell_ranks)):
                verb = "does" if len(absent) == 1 else "do"
                return (
                    f"Rank {rank} started {_name(call)}, which needs {name_ranks(absent)}, which {verb} not run this "
                    "cell: pass `group=subgroup` to use the ranks of the cell alone"
                )
    return ""


def _name(call: PendingCall) -> str:
    return PUBLIC_NAMES.get(call.name, call.name)
