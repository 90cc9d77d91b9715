"""`%%distributed` and `%%rank`: a cell on ranks."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, cell_magic, magics_class

from axon_nb.cluster.cells import source as cell_code
from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.session import current, start
from axon_nb.errors import UsageError
from axon_nb.magics.arguments import HelpAsked, LineParser, parse
from axon_nb.magics.measure import Measures, add_measures, read_measures
from axon_nb.records.ranks import format_ranks, resolve_ranks

if TYPE_CHECKING:
    from axon_nb.widgets.cell.views import CellViews

__all__ = ["CellMagics", "cell_parser"]


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


@functools.cache
def cell_parser(name: str) -> LineParser:
    """The options of `%%distributed` or `%%rank`."""
    parser = LineParser(f"%%{name}", "Run the cell on the ranks.")
    if name == "rank":
        parser.add_argument("ranks", metavar="RANKS", help="which ranks: 0 or 0,2-3")
    else:
        parser.add_argument("--ranks", metavar="RANKS", default=None, help="which ranks: 0 or 0,2-3 (default: all)")
    parser.add_argument("--noblock", action="store_true", help="return at once, with a handle")
    parser.add_argument("--out", metavar="NAME", default=None, help="bind the result, or the handle, to this name")
    parser.add_argument("--local", action="store_true", help="run the cell in the notebook too, after the ranks")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=_seconds, default=None, help="end the cell after this long"
    )
    parser.add_argument("--quiet", action="store_true", help="show nothing of what ranks print")
    parser.add_argument("--watch", action="store_true", help="show live what each rank does")
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
    options: dict[str, Any]
    """What goes to `Cluster.run` and its kin."""


@magics_class
class CellMagics(Magics):
    """A cell on ranks."""

    @cell_magic
    def distributed(self, line: str, cell: str) -> Any:
        """Run the cell on the ranks.

        %%distributed [--ranks 0,2-3] [--noblock] [--out NAME] [--local] [--timeout S] [--quiet] [--watch]
                      [--time] [--repeat N] [--profile [RANKS]]

        --ranks RANKS   which ranks, such as 0 or 0,2-3; default: all
        --noblock       return at once, with a handle: .result(), .done(), .cancel()
        --out NAME      bind the CellResult, or the handle, to NAME
        --local         run the cell in the notebook too, after the ranks
        --timeout S     end the cell after S seconds
        --quiet         show nothing of what ranks print
        --watch         show live what each rank does
        --time          tell how long each rank took, and name the slowest
        --repeat N      run the cell N times, ranks in step, and tell best, mean and spread of each rank
        --profile [R]   profile the cell with torch.profiler on all ranks, or on ranks R: a table and a trace for each

        Example: `%%distributed --ranks 0-1 --time`, and below it `dist.all_reduce(torch.ones(8))`.
        """
        return self.run_blocking("distributed", line, cell)

    @cell_magic
    def rank(self, line: str, cell: str) -> Any:
        """Run the cell on one or a few ranks, with the options of %%distributed.

        Example: `%%rank 0`, and below it `print(model)`.
        """
        return self.run_blocking("rank", line, cell)

    async def run(self, name: str, line: str, cell: str, *, plain: bool = False) -> Any:
        """Run one cell; the awaited form of both magics, which leaves the event loop free.

        Args:
            name: Of the magic.
            line: What stands behind it.
            cell: The lines below it.
            plain: Whether there is no magic: the cell is one that auto mode sends to ranks.
        """
        request = self._prepare(name, line, cell, plain=plain)
        if request is None:
            return None
        if request.noblock:
            return self._start_noblock(request)
        with _watching(request) as views:
            result = await request.cluster.run_async(
                request.code, view=views.watch if views else None, **request.options
            )
        result = dataclasses.replace(result, views=views)
        request.measures.show(result)
        if request.out:
            self.shell.user_ns[request.out] = result
        if request.local:
            python = self.shell.transform_cell(cell)
            (await self.shell.run_cell_async(cell, store_history=False, transformed_cell=python)).raise_error()
        return None

    def run_blocking(self, name: str, line: str, cell: str, *, plain: bool = False) -> Any:
        """As `run`, where nothing is awaited."""
        request = self._prepare(name, line, cell, plain=plain)
        if request is None:
            return None
        if request.noblock:
            return self._start_noblock(request)
        with _watching(request) as views:
            result = request.cluster.run(request.code, view=views.watch if views else None, **request.options)
        result = dataclasses.replace(result, views=views)
        request.measures.show(result)
        if request.out:
            self.shell.user_ns[request.out] = result
        if request.local:
            self.shell.run_cell(cell, store_history=False).raise_error()
        return None

    def _prepare(self, name: str, line: str, cell: str, *, plain: bool) -> _Request | None:
        try:
            options = parse(cell_parser(name), line)
        except HelpAsked as asked:
            print(asked)
            return None
        if cell_code.is_empty(cell):
            print(f"Nothing to run: put code for the ranks below the %%{name} line.")
            return None
        if options.out is not None and not options.out.isidentifier():
            raise UsageError(f"--out {options.out}: it is no variable name.")
        code = cell if plain else cell_code.with_head(cell, f"%%{name} {line}")
        number = _prompt(self.shell)
        if current.get() is None:
            cell_code.check(code, name=f"Cell In[{number}]")  # before ranks are started for it
        cluster = _cluster()
        ranks = resolve_ranks(options.ranks, cluster.world_size)
        measures = read_measures(options, ranks, number)
        if plain:
            where = f"On ranks {format_ranks(ranks)}"
            print(f"{where} (`%distributed auto on`; a `%%local` cell runs in the notebook):", flush=True)
        return _Request(
            cluster=cluster,
            code=code,
            noblock=options.noblock,
            out=options.out,
            local=options.local,
            watch=options.watch,
            measures=measures,
            options={
                "ranks": ranks,
                "quiet": options.quiet,
                "timeout": options.timeout,
                "cell": number,
                "values": options.out is not None,
                "show_value": True,
                "alone": not options.noblock,
                "measurement": measures.measurement(),
            },
        )

    def _start_noblock(self, request: _Request) -> Any:
        handle = request.cluster.run_noblock(request.code, **{**request.options, "values": True})
        if request.out:
            self.shell.user_ns[request.out] = handle
            return None
        return handle


def _prompt(shell: Any) -> int:
    # execution_count is one ahead while a cell runs; the history's last entry is the running cell.
    return len(shell.history_manager.input_hist_parsed) - 1


def _cluster() -> Cluster:
    cluster = current.get()
    if cluster is None:
        cluster = start.start()
        print(f"Started {cluster.world_size} ranks ({cluster.backend}); `%distributed start -n N` chooses.")
    return cluster


@contextlib.contextmanager
def _watching(request: _Request) -> Iterator[CellViews | None]:
    if not request.watch:
        yield None
        return
    from axon_nb.widgets.cell.views import cell_views

    title = f"In [{request.options['cell']}]"
    with cell_views(request.cluster, request.options["ranks"], title=title) as views:
        yield views
