"""`%%distributed` and `%%rank`: a cell on ranks."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from IPython.core.magic import Magics, cell_magic, magics_class

from axon_nb.cluster import code as cell_code
from axon_nb.cluster import current, startup
from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.ranks import resolve_ranks
from axon_nb.cluster.watch import Watch
from axon_nb.errors import UsageError
from axon_nb.magics.arguments import LineParser, parse

__all__ = ["CellMagics"]


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def _parser(name: str) -> LineParser:
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
    return parser


@dataclass(frozen=True, slots=True)
class _Request:
    cluster: Cluster
    code: str
    noblock: bool
    out: str | None
    local: bool
    watch: bool
    options: dict[str, Any]
    """What goes to `Cluster.run` and its kin."""


@magics_class
class CellMagics(Magics):
    """A cell on ranks."""

    @cell_magic
    def distributed(self, line: str, cell: str) -> Any:
        """Run the cell on the ranks.

        %%distributed [--ranks 0,2-3] [--noblock] [--out NAME] [--local] [--timeout S] [--quiet] [--watch]

        --ranks RANKS   which ranks, such as 0 or 0,2-3; default: all
        --noblock       return at once, with a handle: .result(), .done(), .cancel()
        --out NAME      bind the CellResult, or the handle, to NAME
        --local         run the cell in the notebook too, after the ranks
        --timeout S     end the cell after S seconds
        --quiet         show nothing of what ranks print
        --watch         show live what each rank does
        """
        return self._run_blocking("distributed", line, cell)

    @cell_magic
    def rank(self, line: str, cell: str) -> Any:
        """Run the cell on one or a few ranks: %%rank 0, with the options of %%distributed."""
        return self._run_blocking("rank", line, cell)

    async def run(self, name: str, line: str, cell: str) -> Any:
        """Run one cell; the awaited form of both magics, which leaves the event loop free."""
        request = self._prepare(name, line, cell)
        if request is None:
            return None
        if request.noblock:
            return self._start_noblock(request)
        with _watching(request) as view:
            result = await request.cluster.run_async(request.code, view=view, **request.options)
        if request.out:
            self.shell.user_ns[request.out] = result
        if request.local:
            python = self.shell.transform_cell(cell)
            (await self.shell.run_cell_async(cell, store_history=False, transformed_cell=python)).raise_error()
        return None

    def _run_blocking(self, name: str, line: str, cell: str) -> Any:
        request = self._prepare(name, line, cell)
        if request is None:
            return None
        if request.noblock:
            return self._start_noblock(request)
        with _watching(request) as view:
            result = request.cluster.run(request.code, view=view, **request.options)
        if request.out:
            self.shell.user_ns[request.out] = result
        if request.local:
            self.shell.run_cell(cell, store_history=False).raise_error()
        return None

    def _prepare(self, name: str, line: str, cell: str) -> _Request | None:
        options = parse(_parser(name), line)
        if cell_code.is_empty(cell):
            print(f"Nothing to run: put code for the ranks below the %%{name} line.")
            return None
        if options.out is not None and not options.out.isidentifier():
            raise UsageError(f"--out {options.out}: it is no variable name.")
        code = cell_code.with_head(cell, f"%%{name} {line}")
        number = _prompt(self.shell)
        if current.get() is None:
            cell_code.check(code, name=f"Cell In[{number}]")  # before ranks are started for it
        cluster = _cluster()
        return _Request(
            cluster=cluster,
            code=code,
            noblock=options.noblock,
            out=options.out,
            local=options.local,
            watch=options.watch,
            options={
                "ranks": resolve_ranks(options.ranks, cluster.world_size),
                "quiet": options.quiet,
                "timeout": options.timeout,
                "cell": number,
                "values": options.out is not None,
                "show_value": True,
                "alone": not options.noblock,
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
        cluster = startup.start()
        print(f"Started {cluster.world_size} ranks ({cluster.backend}); `%distributed start -n N` chooses.")
    return cluster


@contextlib.contextmanager
def _watching(request: _Request) -> Iterator[Watch | None]:
    if not request.watch:
        yield None
        return
    from axon_nb.widgets.strip import RankStrip
    from axon_nb.widgets.timeline_cell import cell_timeline

    title = f"In [{request.options['cell']}]"
    strip = RankStrip(request.options["ranks"], title=title)
    strip.start()
    with (
        cell_timeline(request.cluster, request.options["ranks"], title=title),
        Watch(request.cluster.client, request.options["ranks"], strip) as watch,
    ):
        yield watch
