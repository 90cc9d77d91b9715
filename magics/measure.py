"""`--time`, `--repeat` and `--profile` of a cell on ranks: what to measure, and how it is shown.

How long a cell took on each rank, in words, and what a profiler saw as a table.
"""

from __future__ import annotations

import argparse
import datetime as dt
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.display import display

from axon_nb.cluster.cells.result import CellResult
from axon_nb.errors import UsageError
from axon_nb.magics.arguments import LineParser
from axon_nb.records.protocol.cells import Measurement
from axon_nb.records.ranks import resolve_ranks

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Measures", "add_measures", "duration", "profile_frame", "read_measures", "repeat_lines", "time_lines"]


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
        profiles: By rank the fields of `records.protocol.cells.Profile`.
    """
    import pandas as pd

    rows = [{"rank": rank, **row} for rank, told in sorted(profiles.items()) for row in told["rows"]]
    return pd.DataFrame(rows)


_FOLDER = "axon_profiles"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of runs above 0")
    return int(text)


def add_measures(parser: LineParser) -> None:
    """Add the options."""
    parser.add_argument("--time", action="store_true", help="tell how long each rank took")
    parser.add_argument("--repeat", metavar="N", type=_count, default=0, help="run the cell N times and tell how long")
    parser.add_argument(
        "--profile", metavar="RANKS", nargs="?", const="", default=None, help="profile it, on all ranks or those named"
    )


@dataclass(frozen=True, slots=True)
class Measures:
    """What is measured of one cell."""

    time: bool
    repeat: int
    """How often the cell runs; 0: once, and nothing is told of it."""
    profiled: Sequence[int]
    """The ranks whose profile is taken."""
    folder: Path
    """Where traces go."""

    def measurement(self) -> Measurement:
        """What the ranks are told."""
        return Measurement(self.time, self.repeat, tuple(self.profiled), str(self.folder))

    def show(self, result: CellResult) -> None:
        """Tell what came out."""
        if self.repeat:
            print("\n".join(repeat_lines(result.repetitions)))
        if self.time:
            print("\n".join(time_lines(result.seconds, result.cpu_seconds)))
        if result.profiles:
            self._show_profiles(result.profiles)

    def _show_profiles(self, profiles: Mapping[int, Mapping[str, Any]]) -> None:
        display(profile_frame(profiles))
        for rank, told in profiles.items():
            print(f"rank {rank}: {told['trace']}")
        print(
            f"Open a trace in chrome://tracing or ui.perfetto.dev, or all with `tensorboard --logdir {self.folder}` "
            "(with the plugin torch-tb-profiler)."
        )


def read_measures(options: argparse.Namespace, ranks: Sequence[int], cell: int) -> Measures:
    """What a magic's options ask for.

    Args:
        options: As parsed.
        ranks: The ranks of the cell.
        cell: Its number.

    Raises:
        UsageError: a rank is to be profiled that does not run the cell.
    """
    profiled: list[int] = []
    if options.profile is not None:
        profiled = resolve_ranks(options.profile, max(ranks) + 1) if options.profile else list(ranks)
        if outside := sorted(set(profiled) - set(ranks)):
            raise UsageError(f"--profile {options.profile}: rank {outside[0]} does not run this cell.")
    moment = dt.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = Path.cwd() / _FOLDER / f"cell-{cell}-{moment}"
    return Measures(bool(options.time), int(options.repeat), profiled, folder)
