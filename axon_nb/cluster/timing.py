"""How long a cell took on each rank, in words, and what a profiler saw as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["duration", "profile_frame", "repeat_lines", "time_lines"]


def duration(seconds: float) -> str:
    """A time with three digits and its unit, as `%timeit` writes it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e9:.3g} ns"


def time_lines(wall: Mapping[int, float], cpu: Mapping[int, float]) -> list[str]:
    """A line a rank, and which was the slowest.

    Args:
        wall: Seconds that the cell took, by rank.
        cpu: Seconds of processor time that the rank's threads used meanwhile.
    """
    lines = [f"rank {rank}: {duration(wall[rank])} wall, {duration(cpu.get(rank, 0.0))} CPU" for rank in sorted(wall)]
    return [*lines, *_slowest(wall)]


def repeat_lines(repetitions: Mapping[int, Sequence[float]]) -> list[str]:
    """A line a rank as `%timeit` writes it, and which was the slowest on average.

    Args:
        repetitions: Seconds of each run of the cell, by rank.
    """
    lines = []
    for rank, seconds in sorted(repetitions.items()):
        spread = statistics.pstdev(seconds)
        mean, count = statistics.fmean(seconds), len(seconds)
        runs = "1 run" if count == 1 else f"{count} runs"
        of = f"{duration(mean)} ± {duration(spread)} (mean ± std. dev. of {runs})"
        lines.append(f"rank {rank}: {of}, best {duration(min(seconds))}")
    return [*lines, *_slowest({rank: statistics.fmean(seconds) for rank, seconds in repetitions.items()})]


def _slowest(wall: Mapping[int, float]) -> list[str]:
    if len(wall) < 2:
        return []
    rank = max(wall, key=lambda rank: wall[rank])
    others = statistics.median(seconds for other, seconds in wall.items() if other != rank)
    return [f"slowest: rank {rank}, {duration(wall[rank] - others)} more than the median of the others"]


def profile_frame(profiles: Mapping[int, Mapping[str, Any]]) -> pd.DataFrame:
    """One row an operation and rank, those that took most first; times in milliseconds.

    Args:
        profiles: By rank what `axon_nb.engine.measuring` tells: ``rows`` and ``trace``.
    """
    import pandas as pd

    rows = [{"rank": rank, **row} for rank, told in sorted(profiles.items()) for row in told["rows"]]
    return pd.DataFrame(rows)
