"""`%shards`, `%inside`, `%watch`, `%memory` and `%timeline`: live views of the ranks."""

from __future__ import annotations

import argparse
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.display import display

from axon_nb import plan
from axon_nb.cluster.cells import source as cell_code
from axon_nb.cluster.session import clusters
from axon_nb.errors import UsageError
from axon_nb.magics.arguments import LineParser, command, parse
from axon_nb.records.ranks import resolve_ranks

_HIDDEN = ("In", "Out", "exit", "quit", "get_ipython", "open")


def _shards_parser() -> LineParser:
    parser = LineParser("%shards", "Show which rank holds which part of a tensor.")
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--gradients", action="store_true", help="show gradients besides parameters")
    return parser


@magics_class
class ViewMagics(Magics):
    """Views of a cluster."""

    @line_magic
    @command(_shards_parser)
    def shards(self, options: argparse.Namespace) -> None:
        """Show which rank holds which part of modules, optimizers or tensors: `%shards model [--gradients]`.

        Example: `%shards model optimizer`.

        The view is updated by later cells until it is opened again for the same names.
        """
        cluster = clusters.require("%shards")
        from axon_nb.widgets.open import show_shards

        show_shards(cluster, options.names, gradients=options.gradients)

    @line_magic
    @command(lambda: LineParser("%inside", "Show what axon_nb.inside has recorded.", "name", metavar="NAME"))
    def inside(self, options: argparse.Namespace) -> None:
        """Show what `axon_nb.inside` has recorded: `%inside seen`; norms, attention maps, what a logit lens reads.

        Example: `%inside seen`, after a cell with `with inside.record(model, "layers.*") as seen:`.

        The picture is redrawn after later cells that record again, until it is opened again for the same name.
        """
        cluster = clusters.require("%inside")
        from axon_nb.widgets.open import show_inside

        show_inside(cluster, options.name)


@magics_class
class JobViewMagics(Magics):
    """Views of a running job."""

    @line_magic
    @command(lambda: LineParser("%watch", "Show a running job live."))
    def watch(self, options: argparse.Namespace) -> None:
        """Show a running job live: `%watch`; metrics of `axon_nb.log`, throughput, communication, memory, ranks.

        Example: `%watch`, in a cell before the one that trains.

        The panel is updated by later cells until it is opened again; its button interrupts the running cell.
        """
        cluster = clusters.require("%watch")
        from axon_nb.widgets.open import show_watch

        show_watch(cluster)

    @line_magic
    @command(lambda: LineParser("%memory", "Show what each rank's memory holds.", "names", nargs="*", metavar="NAME"))
    def memory(self, options: argparse.Namespace) -> None:
        """Show what each rank's memory holds: `%memory [model optimizer …]`; default: everything that variables hold.

        Example: `%memory model optimizer`.

        The panel is updated by later cells until it is opened again for the same names.
        """
        cluster = clusters.require("%memory")
        from axon_nb.widgets.open import show_memory

        show_memory(cluster, options.names)


def _timeline_parser() -> LineParser:
    parser = LineParser("%timeline", "Show each rank's spans over time.")
    parser.add_argument("--ranks", default=None, help="which ranks: 0 or 0,2-3 (default: all)")
    parser.add_argument("--cell", default=None, metavar="N[,M]", help="show only the finished cell In [N], or two")
    parser.add_argument("--advise", action="store_true", help="say what would shorten a training step, and by how much")
    parser.add_argument(
        "--save", default=None, metavar="FILE", help="write .json (Perfetto), .html, .csv or .svg instead"
    )
    return parser


def _cells(text: str | None) -> list[int]:
    """Parse numbers of cells: none, one, or two."""
    parts = text.split(",") if text is not None else []
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--cell: must be the number of a cell, or two, such as 7,9; got {text!r}.")
    return [int(part) for part in parts]


@magics_class
class TimelineMagics(Magics):
    """Timelines of a cluster."""

    @line_magic
    @command(_timeline_parser)
    def timeline(self, options: argparse.Namespace) -> None:
        """Show each rank's spans over time.

        `%timeline [--ranks 0,2-3] [--cell N[,M]] [--advise | --save FILE]`

        It shows forwards, backwards, optimizer steps, collectives and waiting; and a pipeline's last step beside its
        ideal. The view is updated by later cells until it is opened again.

        --ranks RANKS   which ranks, such as 0 or 0,2-3; default: all
        --cell N        show only the finished cell In [N]; with two, such as 7,9, show them beside each other
        --advise        say what would shorten a training step, most first, and by how much
        --save FILE     write a file instead: .json is a trace for Perfetto, .html a page, .csv a table, .svg a picture

        Example: `%timeline --ranks 0-1`, or `%timeline --save trace.json`.
        """
        cluster = clusters.require("%timeline")
        ranks = resolve_ranks(options.ranks, cluster.world_size)
        cells = _cells(options.cell)
        if len(cells) == 2:
            if options.save is not None:
                raise UsageError(f"--save: must have one cell at a time; got --cell {options.cell}.")
            from axon_nb.widgets.open import compare_cells

            compare_cells(cluster, ranks, cells)
            return
        cell = cells[0] if cells else None
        if options.advise:
            if options.save is not None:
                raise UsageError("--advise: shows advice and writes no file; leave --save out.")
            from axon_nb.widgets.open import show_advice

            show_advice(cluster, ranks, cell=cell)
            return
        if options.save is None:
            from axon_nb.widgets.open import show_timeline

            show_timeline(cluster, ranks, cell=cell)
            return
        from axon_nb.widgets.timeline.record import Timeline

        Timeline(cluster, ranks, cell=cell).save(options.save)
        print(f"Saved the timeline as {options.save}.")


# ---- `%%plan`: run a cell on ranks that do not exist -----------------------------------------------------------------


def plan_parser() -> LineParser:
    """Create the parser of `%%plan`."""
    parser = LineParser("%%plan", "Run the cell on ranks that do not exist: memory, collectives, time of a step.")
    parser.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--card", default="h100", help="a GPU's name such as h100 or a100, or cpu (default: h100)")
    parser.add_argument("--memory", type=float, metavar="GIB", help="GiB per rank (default: the card's)")
    parser.add_argument("--item", type=float, metavar="X", help="what .item() answers; without it, that is an error")
    parser.add_argument("--all", action="store_true", help="run every rank, not one of each kind")
    parser.add_argument("--out", metavar="NAME", help="bind the result to this name")
    return parser


@magics_class
class PlanMagics(Magics):
    """Plans of cells."""

    @cell_magic
    def plan(self, line: str, cell: str) -> None:
        """Run the cell on ranks that do not exist: memory by line, collectives, the time of a step, and its timeline.

        %%plan -n N [--card h100] [--memory GIB] [--item X] [--all] [--out NAME]

        -n N          number of ranks
        --card CARD   a GPU's name such as h100 or a100, or cpu; default: h100
        --memory GIB  GiB per rank; default: the card's
        --item X      what `.item()` answers; without it, reading a tensor's value is an error
        --all         run every rank, not one of each kind
        --out NAME    bind the result of `axon_nb.plan.run` to NAME

        The cell runs in another process with the notebook's variables that it names; it changes none of them. What it
        prints is lost.

        Example: `%%plan -n 64 --card h100`, and below it the code that trains.
        """
        options = parse(plan_parser(), line)
        if options is None:
            return
        if cell_code.is_empty(cell):
            raise UsageError("%%plan needs the code that trains, below its line.")
        file = f"In [{self.shell.execution_count}]"
        source = self.shell.transform_cell(cell_code.with_head(cell, f"%%plan {line}"))
        planned = plan.run(
            self._program(source, file, options.card),
            options.ranks,
            device=options.card,
            memory=options.memory,
            item=options.item,
            ranks="all" if options.all else "distinct",
            name=file,
        )
        if options.out:
            self.shell.user_ns[options.out] = planned
        display(planned)
        if planned.has_times:
            from axon_nb.widgets.open import show_planned

            show_planned(planned.spans, planned.title)

    def _program(self, source: str, file: str, card: str) -> Any:
        from axon_nb.plan.program.cell import cell_program

        variables = {name: value for name, value in self.shell.user_ns.items() if name not in _HIDDEN}
        return cell_program(source, file, variables, "cpu" if card == "cpu" else "cuda")
