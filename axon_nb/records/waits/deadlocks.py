"""Deadlock analysis: which rank waits for which, from the communication calls that each rank reports."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from axon_nb.records.ranks import name_ranks
from axon_nb.records.waits.calls import SAME_SIZE_CALLS, PendingCall, RankWaits, missing_peers
from axon_nb.records.waits.functions import PUBLIC_NAMES, advice_for

__all__ = ["explain_deadlock"]

_USER_THREAD_GRACE_S = 30.0
"""For this long a rank with a user thread running may still communicate, whatever its main thread does."""


def _possible_senders(waiting: RankWaits, call: PendingCall, reports: Mapping[int, RankWaits]) -> set[int]:
    """Ranks of which one must still send, for a recv from any rank; none if one has, or for other calls."""
    if call.sequence or call.peer >= 0:
        return set()
    others = {rank for rank in call.ranks if rank != waiting.rank and rank in reports}
    sends = any(c.name == "send" and c.peer == waiting.rank for rank in others for c in reports[rank].pending)
    return set() if sends else others


def explain_deadlock(reports: Mapping[int, RankWaits], cell_ranks: Collection[int], after_s: float) -> str | None:
    """Explain why the cell is deadlocked; None if it is not, or if that is not proven.

    A rank is deadlocked if it waits for a rank that is not running the cell (any more), or for a deadlocked rank.
    Slow ranks never count as missing; ranks with a running user thread do not count as missing for 30 s.

    Args:
        reports: The report of each rank, all taken at the same time.
        cell_ranks: The ranks that the cell was sent to.
        after_s: Minimum waiting time of a call to be considered, in seconds.
    """
    blocked = {rank: call for rank, state in reports.items() if (call := state.blocked_in) and call.seconds >= after_s}
    if (mismatch := _mismatch(blocked, reports)) is not None:
        return mismatch + advice_for(reports[rank].via for rank in blocked)
    threaded = {rank for rank, state in reports.items() if state.threads}
    missing, senders = {}, {}
    for rank, call in blocked.items():
        patient = threaded if call.seconds < _USER_THREAD_GRACE_S else set()
        missing[rank] = missing_peers(reports[rank], call, reports) - patient
        senders[rank] = set() if patient else _possible_senders(reports[rank], call, reports)
    finished = {rank for rank, state in reports.items() if not state.running}
    deadlocked = set(blocked)
    while True:
        over = finished | deadlocked
        remaining = {r for r in deadlocked if missing[r] & over or (senders[r] and senders[r] <= over)}
        if remaining == deadlocked:
            break
        deadlocked = remaining
    if not deadlocked:
        return None
    waits = {rank: missing[rank] & (finished | deadlocked) for rank in deadlocked}
    return _sentence(waits, reports, finished, cell_ranks) + advice_for(
        reports[rank].via for rank in sorted(deadlocked)
    )


def _mismatch(blocked: Mapping[int, PendingCall], reports: Mapping[int, RankWaits]) -> str | None:
    for rank, call in blocked.items():
        for other, report in reports.items():
            theirs = next((c for c in report.pending if (c.group, c.sequence) == (call.group, call.sequence)), None)
            if other == rank or call.sequence == 0 or theirs is None:
                continue
            if other not in blocked or blocked[other] is not theirs:
                if theirs.name == call.name or report.blocked_in is theirs:
                    continue
                started = PUBLIC_NAMES.get(theirs.name, theirs.name)
                return (
                    f"Collective mismatch: rank {rank} is in {reports[rank].place}, rank {other} started {started} "
                    "with `async_op=True` instead and does not wait for it, on the same group."
                )
            here, there = reports[rank].place, report.place
            if theirs.name != call.name:
                return f"Collective mismatch: rank {rank} is in {here}, rank {other} in {there}, on the same group."
            if call.name in SAME_SIZE_CALLS and theirs.bytes != call.bytes:
                return (
                    f"Size mismatch: rank {rank} passed {call.bytes:,} bytes to {here}, "
                    f"rank {other} passed {theirs.bytes:,} bytes to {there}."
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
    for (place, missing), ranks in grouped.items():
        verb = "waits" if len(ranks) == 1 else "wait"
        if not missing:
            parts.append(f"{name_ranks(ranks)} {verb} in {place} for a message from any rank, and no rank sends one")
            continue
        parts.append(
            f"{name_ranks(ranks)} {verb} in {place} for {name_ranks(missing)}{_why(missing, finished, cell_ranks)}"
        )
    return "; ".join(parts) + "."


def _why(ranks: Collection[int], finished: Collection[int], cell_ranks: Collection[int]) -> str:
    if not set(ranks) <= set(finished):
        return ""
    verb = ("has", "does") if len(ranks) == 1 else ("have", "do")
    if set(ranks) <= set(cell_ranks):
        return f", which {verb[0]} finished the cell"
    return f", which {verb[1]} not run this cell" if not set(ranks) & set(cell_ranks) else ""
