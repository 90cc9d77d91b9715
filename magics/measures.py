"""`--time`, `--repeat` and `--profile` of a cell on ranks: what to measure, and how it is shown."""

from __future__ import annotations

import argparse
import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from IPython.display import display

from axon_nb.cluster.ranks import resolve_ranks
from axon_nb.cluster.result import CellResult
from axon_nb.cluster.timing import profile_frame, repeat_lines, time_lines
from axon_nb.errors import UsageError
from axon_nb.magics.arguments import LineParser

__all__ = ["Measures", "add_measures", "read_measures"]

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

    def facts(self) -> dict[str, Any]:
        """What the ranks are told."""
        facts: dict[str, Any] = {"timed": True} if self.time else {}
        if self.repeat:
            facts["repeat"] = self.repeat
        if self.profiled:
            facts["profile"] = {"ranks": list(self.profiled), "folder": str(self.folder)}
        return facts

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
