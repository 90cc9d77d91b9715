"""Options of a cell on ranks: what it measures, with the results as text and tables, and where it pauses."""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import statistics
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.display import display

from axon_nb.cluster.branches import read_plan, run_branches
from axon_nb.cluster.cells.result import CellResult
from axon_nb.cluster.comparison.run import compare
from axon_nb.cluster.debugger.breakpoints import BreakpointPrompt
from axon_nb.errors import UsageError
from axon_nb.magics.arguments import LineParser
from axon_nb.records.protocol.cells import Measurement, Pauses, Profile
from axon_nb.records.ranks import resolve_ranks

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = {
    "name": "operation",
    "calls": "calls",
    "self_cpu_ms": "self CPU ms",
    "cpu_ms": "CPU ms",
    "self_device_ms": "self device ms",
}
_FOLDER = "axon_profiles"


def seconds(text: str) -> float:
    """Parse a timeout."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0; got {text}")
    return value


def duration(seconds: float) -> str:
    """Format a duration with three digits and a unit, as `%timeit` does."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e9:.3g} ns"


def time_lines(wall: Mapping[int, float], cpu: Mapping[int, float]) -> list[str]:
    """Return one line per rank, and one for the slowest rank.

    Args:
        wall: Seconds that the cell took, by rank.
        cpu: CPU seconds of all threads of the rank, by rank.
    """
    lines = [f"rank {rank}: {duration(wall[rank])} wall, {duration(cpu.get(rank, 0.0))} CPU" for rank in sorted(wall)]
    return [*lines, *_slowest(wall)]


def repeat_lines(repetitions: Mapping[int, Sequence[float]]) -> list[str]:
    """Return one line per rank, as `%timeit` writes it, and one for the rank that was slowest on average.

    Args:
        repetitions: Seconds of each run of the cell, by rank.
    """
    lines = []
    for rank, seconds in sorted(repetitions.items()):
        spread = statistics.pstdev(seconds)
        mean, count = statistics.fmean(seconds), len(seconds)
        runs = "1 run" if count == 1 else f"{count} runs"
        average = f"{duration(mean)} ± {duration(spread)} (mean ± std. dev. of {runs})"
        lines.append(f"rank {rank}: {average}, best {duration(min(seconds))}")
    return [*lines, *_slowest({rank: statistics.fmean(seconds) for rank, seconds in repetitions.items()})]


def _slowest(wall: Mapping[int, float]) -> list[str]:
    if len(wall) < 2:
        return []
    rank = max(wall, key=lambda rank: wall[rank])
    others = statistics.median(seconds for other, seconds in wall.items() if other != rank)
    return [f"slowest: rank {rank}, {duration(wall[rank] - others)} more than the median of the others"]


def profile_frame(profiles: Mapping[int, Profile]) -> pd.DataFrame:
    """Return one row per rank and operation, in milliseconds; those that took longest first.

    Args:
        profiles: The profiles by rank.
    """
    import pandas as pd

    rows = [{"rank": rank, **asdict(one)} for rank, profile in sorted(profiles.items()) for one in profile.operations]
    return pd.DataFrame(rows).rename(columns=_COLUMNS).dropna(axis="columns", how="all")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of runs above 0; got {text!r}")
    return int(text)


def add_measures(parser: LineParser) -> None:
    """Add the options to a parser."""
    parser.add_argument("--time", action="store_true", help="show how long each rank took")
    parser.add_argument("--repeat", metavar="N", type=_count, default=0, help="run the cell N times; show the times")
    parser.add_argument(
        "--profile", metavar="RANKS", nargs="?", const="", default=None, help="profile all ranks, or the ranks given"
    )


@dataclass(frozen=True, slots=True)
class Measures:
    """What to measure while one cell runs."""

    time: bool
    repeat: int
    """How often the cell runs; 0: once, without showing the times."""
    profiled: Sequence[int]
    """The ranks to profile."""
    folder: Path
    """The folder for traces."""

    def measurement(self) -> Measurement:
        """Return the options to send to the ranks."""
        return Measurement(self.time, self.repeat, tuple(self.profiled), str(self.folder) if self.profiled else "")

    def show(self, result: CellResult) -> None:
        """Show the measurements."""
        if self.repeat:
            print("\n".join(repeat_lines(result.repetitions)))
        if self.time:
            print("\n".join(time_lines(result.seconds, result.cpu_seconds)))
        if result.profiles:
            self._show_profiles(result.profiles)
        if (numbers := result.numbers) is not None and numbers.finding is not None:
            from axon_nb.widgets.divergence import divergence_bundle

            display(divergence_bundle(numbers), raw=True)
        elif numbers is not None and numbers.steps:
            print(numbers)

    def _show_profiles(self, profiles: Mapping[int, Profile]) -> None:
        display(profile_frame(profiles))
        for rank, profile in profiles.items():
            print(f"rank {rank}: {profile.trace}")
        print(
            f"Open a trace in chrome://tracing or ui.perfetto.dev, or all with `tensorboard --logdir {self.folder}` "
            "(with the plugin torch-tb-profiler)."
        )


def read_measures(options: argparse.Namespace, ranks: Sequence[int], cell: int) -> Measures:
    """Read what to measure from a magic's options.

    Args:
        options: The parsed options.
        ranks: The ranks of the cell.
        cell: The number of the cell.

    Raises:
        UsageError: a rank to profile does not run the cell.
    """
    profiled: list[int] = []
    if options.profile is not None:
        profiled = resolve_ranks(options.profile, max(ranks) + 1) if options.profile else list(ranks)
        if outside := sorted(set(profiled) - set(ranks)):
            raise UsageError(f"--profile {options.profile}: rank {outside[0]} does not run this cell.")
    folder = Path()
    if profiled:
        folder = Path.cwd() / _FOLDER / f"cell-{cell}-{dt.datetime.now():%Y%m%d-%H%M%S}"
    return Measures(bool(options.time), int(options.repeat), profiled, folder)


def add_pauses(parser: LineParser) -> None:
    """Add the options that pause a cell for the debugger."""
    parser.add_argument("--debug", action="store_true", help="pause in the debugger before the first line")
    parser.add_argument(
        "--break",
        dest="before",
        metavar="CALL[:N]",
        type=_call,
        default=("", 0),
        help="pause before each call of a collective, such as all_reduce, or before the N-th",
    )


def read_pauses(shell: Any, options: argparse.Namespace) -> dict[str, Any]:
    """The options of `Cluster.run` for the debugger; where nobody can be asked, the cell does not pause."""
    is_possible = not options.noblock and _can_ask(shell)
    name, number = options.before
    if (options.debug or name) and not is_possible:
        reason = "--noblock runs it in the background" if options.noblock else "this front end has no input()"
        print(f"The cell does not pause for the debugger: {reason}.")
    if not is_possible:
        return {}
    return {"debugger": BreakpointPrompt(), "pauses": Pauses(True, options.debug, name, number)}


def _can_ask(shell: Any) -> bool:
    """Whether the front end that sent the running cell answers input()."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return sys.stdin is not None and sys.stdin.isatty()
    return bool(kernel.get_parent("shell").get("content", {}).get("allow_stdin"))


def _call(text: str) -> tuple[str, int]:
    name, colon, number = text.partition(":")
    if not name.isidentifier() or (colon and not (number.isdecimal() and int(number))):
        raise argparse.ArgumentTypeError(f"must be a function such as all_reduce or all_reduce:3; got {text!r}")
    return name, int(number or 0)


@dataclass(frozen=True, slots=True)
class CellRuns:
    """How a cell runs more than once."""

    run: Callable[..., Coroutine[Any, Any, Any]]
    """Takes the cluster, what runs a cell on it, the code, and the options of `Cluster.run`."""
    bundle: Callable[[Any], dict[str, str]]
    """Shows what it returns."""


def add_runs(parser: LineParser) -> None:
    """Add the options that restore the state before a cell, or run it several times from there."""
    parser.add_argument("--try", dest="restores", action="store_true", help="restore the state from before afterwards")
    parser.add_argument(
        "--branch",
        metavar="NAME=V1,V2",
        default=None,
        help="run the cell once per value, each time from the same state",
    )
    parser.add_argument(
        "--keep", metavar="VALUE", default=None, help="the value whose state stays, or best:loss, highest:accuracy"
    )
    parser.add_argument(
        "--compare",
        metavar="PLAIN",
        nargs="?",
        const="",
        default=None,
        help="compare with one rank; PLAIN is a plain model for one that is split over ranks",
    )


def read_runs(options: argparse.Namespace) -> CellRuns | None:
    """Return what `--branch`, `--keep` and `--compare` say; None if the cell runs once.

    Raises:
        UsageError: they are invalid, or do not go with another option.
    """
    if options.branch is None and options.keep is not None:
        raise UsageError(f"--keep {options.keep} needs --branch, such as --branch lr=1e-3,3e-4.")
    if options.branch is None and options.compare is None:
        return None
    name = "--compare" if options.branch is None else "--branch"
    others = {
        "--compare": options.compare is not None and name == "--branch",
        "--noblock": options.noblock,
        "--try": options.restores,
        "--local": options.local,
    }
    if clash := next((other for other, is_set in others.items() if is_set), None):
        raise UsageError(f"{name} does not go with {clash}.")
    if name == "--compare":
        from axon_nb.widgets.comparison import comparison_bundle

        return CellRuns(functools.partial(compare, plain=options.compare), comparison_bundle)
    from axon_nb.widgets.branches import branches_bundle

    return CellRuns(functools.partial(run_branches, plan=read_plan(options.branch, options.keep)), branches_bundle)
