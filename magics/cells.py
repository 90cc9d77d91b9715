"""`%%distributed` and `%%rank`: run a cell on ranks, with options for what it measures and where it pauses."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import functools
import logging
import statistics
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.display import display
from msgspec import Struct
from msgspec.structs import asdict

from axon_nb.cluster.branches import read_plan, run_branches
from axon_nb.cluster.cells import source as cell_code
from axon_nb.cluster.cells.driver import awaitable, finished
from axon_nb.cluster.cells.options import LiveView
from axon_nb.cluster.cells.result import MIME_TYPE, CellResult
from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.comparison import compare
from axon_nb.cluster.debugger import BreakpointPrompt
from axon_nb.cluster.failures import Failure
from axon_nb.cluster.session import clusters, current
from axon_nb.errors import CellError, CellInterrupt, UsageError
from axon_nb.magics.arguments import LineParser, parse
from axon_nb.magics.distributed import script_cell
from axon_nb.records.protocol.cells import Measurement, Pauses, Profile
from axon_nb.records.ranks import name_ranks, resolve_ranks
from axon_nb.records.units import count_of

if TYPE_CHECKING:
    import pandas as pd

    from axon_nb.widgets.cell.views import CellViews

_COLUMNS = {
    "name": "operation",
    "calls": "calls",
    "self_cpu_ms": "self CPU ms",
    "cpu_ms": "CPU ms",
    "self_device_ms": "self device ms",
}
_FOLDER = "axon_profiles"
_log = logging.getLogger("axon_nb.cells")
_MAX_RECORDS = 16


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
    """Return one row per rank and operation, in milliseconds; those that took longest first."""
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


def show_measured(measured: Measurement, result: CellResult) -> None:
    """Show what was to be measured of a cell."""
    if measured.repeat:
        print("\n".join(repeat_lines(result.repetitions)))
    if measured.is_timed:
        print("\n".join(time_lines(result.seconds, result.cpu_seconds)))
    if result.profiles:
        display(profile_frame(result.profiles))
        for rank, profile in result.profiles.items():
            print(f"rank {rank}: {profile.trace}")
        print(
            "Open a trace in chrome://tracing or ui.perfetto.dev, or all with "
            f"`tensorboard --logdir {measured.folder}` (with the plugin torch-tb-profiler)."
        )
    if (numbers := result.numbers) is not None and numbers.finding is not None:
        from axon_nb.widgets.reports import divergence_bundle

        display(divergence_bundle(numbers), raw=True)
    elif numbers is not None and numbers.steps:
        print(numbers)


def read_measures(options: argparse.Namespace, ranks: Sequence[int], cell: int) -> Measurement:
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
    folder = Path.cwd() / _FOLDER / f"cell-{cell}-{dt.datetime.now():%Y%m%d-%H%M%S}" if profiled else ""
    return Measurement(options.time, options.repeat, tuple(profiled), str(folder))


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


class CellRuns(Struct, frozen=True):
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
        from axon_nb.widgets.reports import comparison_bundle

        return CellRuns(functools.partial(compare, plain=options.compare), comparison_bundle)
    from axon_nb.widgets.reports import branches_bundle

    return CellRuns(functools.partial(run_branches, plan=read_plan(options.branch, options.keep)), branches_bundle)


@functools.cache
def cell_parser(name: str) -> LineParser:
    """Create the parser of `%%distributed` or `%%rank`."""
    parser = LineParser(f"%%{name}", "Run the cell on the ranks.")
    if name == "rank":
        parser.add_argument("ranks", metavar="RANKS", help="which ranks: 0 or 0,2-3")
    else:
        parser.add_argument("--ranks", metavar="RANKS", default=None, help="which ranks: 0 or 0,2-3 (default: all)")
    parser.add_argument("--noblock", action="store_true", help="return a handle at once")
    parser.add_argument("--out", metavar="NAME", default=None, help="bind the result, or the handle, to this name")
    parser.add_argument("--local", action="store_true", help="run the cell in the notebook too, after the ranks")
    parser.add_argument("--timeout", metavar="S", type=seconds, default=None, help="abort the cell after S seconds")
    parser.add_argument("--quiet", action="store_true", help="do not show what ranks print")
    parser.add_argument("--watch", action="store_true", help="show live what each rank is doing")
    add_runs(parser)
    add_pauses(parser)
    add_measures(parser)
    return parser


class _Request(Struct, frozen=True):
    cluster: Cluster
    code: str
    given: argparse.Namespace
    """The options of the magic."""
    measurement: Measurement
    runs: CellRuns | None
    options: dict[str, Any]
    """The keyword arguments of `Cluster.run`, `run_async` and `run_noblock`."""


@dataclass
class _Run:
    view: LiveView | None
    """What watches the cell, for `Cluster.run`; None: nothing does."""
    result: CellResult = field(init=False)


@magics_class
class CellMagics(Magics):
    """Runs cells on ranks."""

    @cell_magic
    def distributed(self, line: str, cell: str) -> Any:
        """Run the cell on the ranks.

        %%distributed [--ranks 0,2-3] [--noblock] [--out NAME] [--local] [--timeout S] [--quiet] [--watch]
                      [--time] [--repeat N] [--profile [RANKS]] [--debug] [--break CALL[:N]]
                      [--try | --branch NAME=V1,V2 [--keep VALUE] | --compare [PLAIN]]

        --ranks RANKS   which ranks, such as 0 or 0,2-3; default: all
        --noblock       return a handle at once: .result(), .done(), .cancel()
        --out NAME      bind the CellResult, or the handle, to NAME
        --local         run the cell in the notebook too, after the ranks
        --timeout S     abort the cell after S seconds
        --try           restore the state from before the cell afterwards, also if it fails
        --branch NAME=V1,V2  run the cell once per value of a variable, each time from the same state; show a table
        --keep VALUE    keep the state of that run, or of best:loss, the run that logged the lowest loss
        --compare [PLAIN]  run the cell on one rank too, with the global batch; show the first tensor that differs
        --quiet         do not show what ranks print
        --watch         show live what each rank is doing
        --debug         pause in the debugger before the first line, as `breakpoint()` does in a later one
        --break CALL[:N]  pause before each call of a collective, such as all_reduce, or before the N-th
        --time          show how long each rank took, and which was slowest
        --repeat N      run the cell N times, ranks in step; show each rank's best and mean time and the spread
        --profile [R]   profile the cell with torch.profiler on all ranks, or on ranks R; show a table, save traces

        Example: `%%distributed --ranks 0-1 --time`, and below it `dist.all_reduce(torch.ones(8))`.
        """
        return self.run_blocking("distributed", line, cell)

    @cell_magic
    def rank(self, line: str, cell: str) -> Any:
        """Run the cell on one or several ranks, with the options of %%distributed.

        Example: `%%rank 0`, and below it `print(model)`.
        """
        return self.run_blocking("rank", line, cell)

    async def run(self, name: str, line: str, cell: str, *, plain: bool = False) -> Any:
        """Run one cell; the awaited form of both magics, which does not block the event loop.

        Args:
            name: Name of the magic; ``run`` for `%distributed run`.
            line: The magic's arguments.
            cell: The lines below it.
            plain: Whether it is a plain cell, without a magic, that auto mode sends to ranks.
        """
        return await self._run(name, line, cell, plain=plain, blocks=False)

    def run_blocking(self, name: str, line: str, cell: str, *, plain: bool = False) -> Any:
        """Run one cell and block until it finishes."""
        return finished(self._run(name, line, cell, plain=plain, blocks=True))

    async def _run(self, name: str, line: str, cell: str, *, plain: bool, blocks: bool) -> Any:
        request = self._prepare(name, line, cell, plain=plain)
        if request is None or request.given.noblock:
            return self._start_noblock(request) if request is not None else None
        run = awaitable(request.cluster.run) if blocks else request.cluster.run_async
        if request.runs is not None:
            with self._explaining(request):
                outcome = await request.runs.run(request.cluster, run, request.code, request.options)
            return self._show_runs(request, outcome)
        with self._shown(request) as shown:
            shown.result = await run(request.code, view=shown.view, **request.options)
        if request.given.local and blocks:
            self.shell.run_cell(cell, store_history=False).raise_error()
        elif request.given.local:
            python = self.shell.transform_cell(cell)
            (await self.shell.run_cell_async(cell, store_history=False, transformed_cell=python)).raise_error()
        return None

    def _prepare(self, name: str, line: str, cell: str, *, plain: bool) -> _Request | None:
        is_script = name == "run"
        if is_script:
            script = script_cell(line)
            if script is None:
                return None
            line, cell = "", script
        options = parse(cell_parser(name), line)
        if options is None:
            return None
        if cell_code.is_empty(cell):
            print(f"Nothing to run: put code for the ranks below the %%{name} line.")
            return None
        if options.out is not None and not options.out.isidentifier():
            raise UsageError(f"--out {options.out}: not a valid variable name.")
        code = cell if plain or is_script else cell_code.with_head(cell, f"%%{name} {line}")
        number = _prompt(self.shell)
        if current.get() is None:
            cell_code.check(code, name=f"Cell In[{number}]")  # do not start ranks for a cell with a syntax error
        cluster = _cluster()
        ranks = resolve_ranks(options.ranks, cluster.world_size)
        measurement = read_measures(options, ranks, number)
        if plain:
            where = f"On {name_ranks(ranks)}"
            print(f"{where} (`%distributed auto on`; a `%%local` cell runs in the notebook):", flush=True)
        return _Request(
            cluster=cluster,
            code=code,
            given=options,
            measurement=measurement,
            runs=read_runs(options),
            options={
                "ranks": ranks,
                "quiet": options.quiet,
                "timeout": options.timeout,
                "cell": number,
                "values": options.out is not None,
                "show_value": True,
                "restores": options.restores,
                "exclusive": not options.noblock,
                "measurement": measurement,
                **read_pauses(self.shell, options),
            },
        )

    def _show_runs(self, request: _Request, outcome: Any) -> None:
        assert request.runs is not None
        display(request.runs.bundle(outcome), raw=True)
        if request.given.out:
            self.shell.user_ns[request.given.out] = outcome

    @contextlib.contextmanager
    def _shown(self, request: _Request) -> Iterator[_Run]:
        """Show what the cell that runs within does and measures, or how it failed, and bind its result."""
        with self._explaining(request), _watching(request) as views:
            run = _Run(views.watch if views is not None else None)
            yield run
        result = replace(run.result, views=views)
        show_measured(request.measurement, result)
        self._attach_record(result.to_dict())
        if request.given.out:
            self.shell.user_ns[request.given.out] = result

    @contextlib.contextmanager
    def _explaining(self, request: _Request) -> Iterator[None]:
        """Show a card if the cell fails; front ends that show no HTML have the error's text."""
        try:
            yield
        except (CellError, CellInterrupt) as error:
            self._attach_record(error.to_dict())
            if hasattr(self.shell, "kernel"):
                try:
                    _show_failure(error, request)
                except Exception:  # the error itself must be shown
                    _log.warning("The card of a failed cell could not be made.", exc_info=True)
            raise

    def _attach_record(self, record: Mapping[str, Any]) -> None:
        """Have the reply to the running cell carry its record, for programs."""
        if (kernel := getattr(self.shell, "kernel", None)) is not None:
            request = kernel.get_parent("shell").get("header", {}).get("msg_id")
            records = current.session().records
            records[request] = record
            while len(records) > _MAX_RECORDS:  # no reply took them along
                records.pop(next(iter(records)))

    def _start_noblock(self, request: _Request) -> Any:
        handle = request.cluster.run_noblock(request.code, **{**request.options, "values": True})
        if request.given.out:
            self.shell.user_ns[request.given.out] = handle
            return None
        return handle


def _show_failure(error: CellError | CellInterrupt, request: _Request) -> None:
    failure = getattr(error, "failure", None)
    if not isinstance(failure, Failure):
        return
    from axon_nb.widgets.reports import failure_card

    options = request.options
    card = {"text/html": failure_card(failure, code=request.code, cell=options["cell"], ranks=options["ranks"])}
    if isinstance(error, CellError) and (lines := error.take_card()):
        card["text/plain"] = "\n".join(lines)
    # Without the time: two equal runs of a notebook save equal outputs.
    display({**card, MIME_TYPE: {**error.to_dict(), "seconds": None}}, raw=True)


def _prompt(shell: Any) -> int:
    # While a cell runs, execution_count is one ahead; the last entry of the history is the running cell.
    return len(shell.history_manager.input_hist_parsed) - 1


def _cluster() -> Cluster:
    cluster = current.get() or clusters.take_over()
    if cluster is None:
        current.session().raise_if_lost()
        cluster = clusters.start()
        count = count_of(cluster.world_size, "rank")
        print(f"Started {count} ({cluster.backend}). Use `%distributed start -n N` to choose how many.")
    return cluster


@contextlib.contextmanager
def _watching(request: _Request) -> Iterator[CellViews | None]:
    if not request.given.watch:
        yield None
        return
    from axon_nb.widgets.cell.views import cell_views

    slowed = request.cluster.state.slowness
    title = f"In [{request.options['cell']}]{f', slowed: {slowed}' if slowed else ''}"
    with cell_views(request.cluster, request.options["ranks"], title=title) as views:
        yield views
