"""Loops over all ranks: the same one of each rank as one bar, with the slowest and the fastest named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axon_nb.records.progress import Bar
from axon_nb.records.quantity import format_seconds
from axon_nb.records.ranks import name_ranks

__all__ = ["MergedBar", "merge_bars"]

_MAX_BARS = 12


@dataclass(frozen=True, slots=True)
class MergedBar:
    """One loop of all ranks that run it."""

    desc: str
    low: float
    """How far the slowest rank is, 0 to 1; 0 where nobody knows how much there is."""
    high: float
    """How far the fastest one is."""
    words: str
    """Such as ``30/100, rank 2 (fastest: 41/100), 12.1it/s, 5.8 s left``."""
    is_over: bool
    """Whether it has ended on all of them."""


def merge_bars(bars: Mapping[int, Sequence[Bar]]) -> list[MergedBar]:
    """Loops of the same name and depth, outer ones first; those that are over on all ranks come last.

    Args:
        bars: The loops of each rank.
    """
    found: dict[tuple[int, str], dict[int, Bar]] = {}
    for rank, own in sorted(bars.items()):
        for bar in own:
            found.setdefault((bar.depth, bar.desc), {})[rank] = bar
    merged = [_merge(found[key]) for key in sorted(found)]
    return sorted(merged, key=lambda bar: bar.is_over)[:_MAX_BARS]


def _merge(bars: Mapping[int, Bar]) -> MergedBar:
    parts = {rank: _part(bar) for rank, bar in bars.items()}
    slowest = min(bars, key=lambda rank: (parts[rank], bars[rank].done))
    fastest = max(bars, key=lambda rank: (parts[rank], bars[rank].done))
    slow, fast = bars[slowest], bars[fastest]
    is_over = all(bar.is_over for bar in bars.values())
    words = _count(slow)
    if _count(fast) != words:
        same = [rank for rank, bar in bars.items() if _count(bar) == words]
        words = f"{words} on {name_ranks(same)}, the slowest; {_count(fast)} on rank {fastest}, the fastest"
    elif len(bars) > 1:
        words = f"{words} on {name_ranks(bars)}"
    return MergedBar(slow.desc, parts[slowest], parts[fastest], f"{words}{_pace(slow, is_over=is_over)}", is_over)


def _part(bar: Bar) -> float:
    return min(1.0, bar.done / bar.total) if bar.total else 0.0


def _count(bar: Bar) -> str:
    return f"{bar.done}/{bar.total}" if bar.total else f"{bar.done} {bar.unit}"


def _pace(bar: Bar, *, is_over: bool) -> str:
    if is_over:
        stopped = bool(bar.total) and bar.done < (bar.total or 0)
        return f", {'stopped' if stopped else 'done'} after {format_seconds(bar.seconds)}"
    rate = bar.done / bar.seconds if bar.seconds > 0 else 0.0
    if not rate:
        return ""
    left = f", {format_seconds((bar.total - bar.done) / rate)} left" if bar.total and bar.total >= bar.done else ""
    return f", {rate:.3g} {bar.unit}/s{left}"
