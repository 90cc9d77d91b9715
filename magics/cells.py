"""`%%distributed` and `%%rank`: run a cell on ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.display import display

from axon_nb.cluster.cells import source as cell_code
from axon_nb.cluster.cells.driver import awaitable, finished
from axon_nb.cluster.cells.options import LiveView
from axon_nb.cluster.cells.record import MIME_TYPE
from axon_nb.cluster.cells.result import CellResult
from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.failures.report import Failure
from axon_nb.cluster.session import current, kept, start
from axon_nb.errors import CellError, CellInterrupt, UsageError
from axon_nb.magics.arguments import LineParser, parse
from axon_nb.magics.cell_options import (
    CellRuns,
    Measures,
    add_measures,
    add_pauses,
    add_runs,
    read_measures,
    read_pauses,
    read_runs,
    seconds,
)
from axon_nb.magics.scripts import script_cell
from axon_nb.records.ranks import name_ranks, resolve_ranks

if TYPE_CHECKING:
    from axon_nb.widgets.cell.views import CellViews

_log = logging.getLogger("axon_nb.cells")
_MAX_RECORDS = 16


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


@dataclass(frozen=True, slots=True)
class _Request:
    cluster: Cluster
    code: str
    noblock: bool
    out: str | None
    local: bool
    watch: bool
    measures: Measures
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
        if request is None or request.noblock:
            return self._start_noblock(request) if request is not None else None
        run = awaitable(request.cluster.run) if blocks else request.cluster.run_async
        if request.runs is not None:
            with self._explaining(request):
                outcome = await request.runs.run(request.cluster, run, request.code, request.options)
            return self._show_runs(request, outcome)
        with self._shown(request) as shown:
            shown.result = await run(request.code, view=shown.view, **request.options)
        if request.local and blocks:
            self.shell.run_cell(cell, store_history=False).raise_error()
        elif request.local:
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
        measures = read_measures(options, ranks, number)
        if plain:
            where = f"On {name_ranks(ranks)}"
            print(f"{where} (`%distributed auto on`; a `%%local` cell runs in the notebook):", flush=True)
        return _Request(
            cluster=cluster,
            code=code,
            noblock=options.noblock,
            out=options.out,
            local=options.local,
            watch=options.watch,
            measures=measures,
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
                "measurement": measures.measurement(),
                **read_pauses(self.shell, options),
            },
        )

    def _show_runs(self, request: _Request, outcome: Any) -> None:
        assert request.runs is not None
        display(request.runs.bundle(outcome), raw=True)
        if request.out:
            self.shell.user_ns[request.out] = outcome

    @contextlib.contextmanager
    def _shown(self, request: _Request) -> Iterator[_Run]:
        """Show what the cell that runs within does and measures, or how it failed, and bind its result."""
        with self._explaining(request), _watching(request) as views:
            run = _Run(views.watch if views is not None else None)
            yield run
        result = dataclasses.replace(run.result, views=views)
        request.measures.show(result)
        self._attach_record(result.to_dict())
        if request.out:
            self.shell.user_ns[request.out] = result

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
        if request.out:
            self.shell.user_ns[request.out] = handle
            return None
        return handle


def _show_failure(error: CellError | CellInterrupt, request: _Request) -> None:
    failure = getattr(error, "failure", None)
    if not isinstance(failure, Failure):
        return
    from axon_nb.widgets.failure import failure_card

    options = request.options
    card = failure_card(failure, code=request.code, cell=options["cell"], ranks=options["ranks"])
    display({"text/html": card, MIME_TYPE: error.to_dict()}, raw=True)


def _prompt(shell: Any) -> int:
    # While a cell runs, execution_count is one ahead; the last entry of the history is the running cell.
    return len(shell.history_manager.input_hist_parsed) - 1


def _cluster() -> Cluster:
    cluster = current.get() or kept.take_over()
    if cluster is None:
        current.session().raise_if_lost()
        cluster = start.start()
        count = f"{cluster.world_size} rank{'' if cluster.world_size == 1 else 's'}"
        print(f"Started {count} ({cluster.backend}). Use `%distributed start -n N` to choose how many.")
    return cluster


@contextlib.contextmanager
def _watching(request: _Request) -> Iterator[CellViews | None]:
    if not request.watch:
        yield None
        return
    from axon_nb.widgets.cell.views import cell_views

    slowed = request.cluster.state.slowness
    title = f"In [{request.options['cell']}]{f', slowed: {slowed}' if slowed else ''}"
    with cell_views(request.cluster, request.options["ranks"], title=title) as views:
        yield views
