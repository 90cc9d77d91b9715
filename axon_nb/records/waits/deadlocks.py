"""Deadlock analysis: which rank waits for which, from the communication calls that each rank reports."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from axon_nb.records.ranks import name_ranks
from axon_nb.records.waits.calls import SAME_SIZE_CALLS, Arrivals, PendingCall, RankWaits
from axon_nb.records.waits.functions import PUBLIC_NAMES, advice_for

_MAX_PARTS = 8
"""Most waits that a sentence lists."""
_USER_THREAD_GRACE_S = 30.0
"""For this long a rank with a user thread running may still communicate, whatever its main thread does."""


@dataclass
class _Wait:
    """What some ranks wait for together."""

    others: frozenset[int]
    """The ranks that have not come."""
    enough: int
    """The wait never ends if so many of them cannot come."""
    is_for_any: bool = False
    """Whether one message, from any of them, ends it."""
    ranks: list[int] = field(default_factory=list)
    """Who waits."""
    num_over: int = 0
    """How many of the others cannot come, as far as is known."""


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
    finished = {rank for rank, state in reports.items() if not state.running}
    waits = _waits(blocked, reports)
    deadlocked = _deadlocked(waits, finished)
    if not deadlocked:
        return None
    lost: dict[int, tuple[int, ...]] = {}
    for wait in waits:
        others = () if wait.is_for_any else tuple(sorted(wait.others & (finished | deadlocked)))
        lost |= {rank: others for rank in wait.ranks if rank in deadlocked}
    return _sentence(lost, reports, finished, cell_ranks) + advice_for(reports[rank].via for rank in sorted(deadlocked))


def _waits(blocked: Mapping[int, PendingCall], reports: Mapping[int, RankWaits]) -> list[_Wait]:
    """Return what the ranks wait for; those that wait for the same ranks share it."""
    arrivals = Arrivals(reports)
    threaded = frozenset(rank for rank, state in reports.items() if state.threads)
    senders: dict[int, set[int]] = {}
    for rank, report in reports.items():
        for sent in report.pending:
            if sent.name == "send":
                senders.setdefault(sent.peer, set()).add(rank)
    waits: dict[tuple[frozenset[int], bool, bool], _Wait] = {}
    for rank, call in blocked.items():
        is_patient = bool(threaded) and call.seconds < _USER_THREAD_GRACE_S
        if is_for_any := call.sequence == 0 and call.peer < 0:
            is_sent = not senders.get(rank, set()).isdisjoint(call.ranks)
            others = frozenset() if is_sent or is_patient else frozenset(call.ranks).intersection(reports)
            enough = max(2, len(others))  # with the rank itself, which cannot send while it waits
        else:
            others, enough = arrivals.missing(reports[rank], call), 1
        key = others, is_for_any, is_patient
        if key not in waits:
            waits[key] = _Wait(others - threaded if is_patient else others, enough, is_for_any)
        waits[key].ranks.append(rank)
    return list(waits.values())


def _deadlocked(waits: Collection[_Wait], finished: set[int]) -> set[int]:
    """Return the ranks that wait for ever: all that wait, without those whose wait can end, and who waits for these."""
    deadlocked = {rank for wait in waits for rank in wait.ranks}
    over = finished | deadlocked
    waiting_for: dict[int, list[_Wait]] = {}
    for wait in waits:
        wait.num_over = len(wait.others & over)
        for other in wait.others:
            waiting_for.setdefault(other, []).append(wait)
    ending = [wait for wait in waits if wait.num_over < wait.enough]
    while ending:
        for rank in ending.pop().ranks:
            deadlocked.discard(rank)
            for wait in waiting_for.get(rank, ()):
                wait.num_over -= 1
                if wait.num_over == wait.enough - 1:  # it has just become one that can end
                    ending.append(wait)
    return deadlocked


def _mismatch(blocked: Mapping[int, PendingCall], reports: Mapping[int, RankWaits]) -> str | None:
    # Of each collective, the first rank of every kind: by operation, by size if it must agree, and whether it waits.
    first: dict[tuple[str, int], dict[tuple[str, int, bool], int]] = {}
    for rank, report in reports.items():
        seen = set()
        for call in report.pending:
            key, waits = (call.group, call.sequence), blocked.get(rank) is call
            if not call.sequence or key in seen:
                continue
            seen.add(key)
            if waits or report.blocked_in is not call:
                size = call.bytes if waits and call.name in SAME_SIZE_CALLS else 0
                first.setdefault(key, {}).setdefault((call.name, size, waits), rank)
    for rank, call in blocked.items():
        here = reports[rank].place
        for (name, size, waits), other in first.get((call.group, call.sequence), {}).items():
            there = reports[other].place
            if name != call.name and not waits:
                started = PUBLIC_NAMES.get(name, name)
                return (
                    f"Collective mismatch: rank {rank} is in {here}, rank {other} started {started} "
                    "with `async_op=True` instead and does not wait for it, on the same group."
                )
            if name != call.name:
                return f"Collective mismatch: rank {rank} is in {here}, rank {other} in {there}, on the same group."
            if waits and name in SAME_SIZE_CALLS and size != call.bytes:
                return (
                    f"Size mismatch: rank {rank} passed {call.bytes:,} bytes to {here}, "
                    f"rank {other} passed {size:,} bytes to {there}."
                )
    return None


def _sentence(
    waits: Mapping[int, tuple[int, ...]],
    reports: Mapping[int, RankWaits],
    finished: Collection[int],
    cell_ranks: Collection[int],
) -> str:
    grouped: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, others in sorted(waits.items()):
        grouped.setdefault((reports[rank].place, others), []).append(rank)
    shown = list(grouped.items())
    if len(shown) > _MAX_PARTS:  # those that wait for ranks which have finished say why, so they come first
        shown = sorted(shown, key=lambda item: not set(item[0][1]) & set(finished))[:_MAX_PARTS]
    parts = []
    for (place, missing), ranks in shown:
        verb = "waits" if len(ranks) == 1 else "wait"
        if not missing:
            parts.append(f"{name_ranks(ranks)} {verb} in {place} for a message from any rank, and no rank sends one")
            continue
        parts.append(
            f"{name_ranks(ranks)} {verb} in {place} for {name_ranks(missing)}{_why(missing, finished, cell_ranks)}"
        )
    if rest := len(waits) - sum(len(ranks) for _, ranks in shown):
        parts.append(f"{rest:,} more ranks wait for these or for each other")
    return "; ".join(parts) + "."


def _why(ranks: Collection[int], finished: Collection[int], cell_ranks: Collection[int]) -> str:
    if not set(ranks) <= set(finished):
        return ""
    verb = ("has", "does") if len(ranks) == 1 else ("have", "do")
    if set(ranks) <= set(cell_ranks):
        return f", which {verb[0]} finished the cell"
    return f", which {verb[1]} not run this cell" if not set(ranks) & set(cell_ranks) else ""
