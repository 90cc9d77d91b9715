"""`%shards`, `%inside`, `%watch`, `%memory` and `%timeline`: live views of the ranks."""

from __future__ import annotations

import argparse

from IPython.core.magic import Magics, line_magic, magics_class

from axon_nb.cluster.session import clusters
from axon_nb.errors import UsageError
from axon_nb.magics.arguments import LineParser, command
from axon_nb.records.ranks import resolve_ranks


def _shards_parser() -> LineParser:
    parser = LineParser("%shards", "Show which rank holds which part of a tensor.")
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--gradients", action="store_true", help="show gradients besides parameters")
    return parser


def _inside_parser() -> LineParser:
    parser = LineParser("%inside", "Show what axon_nb.inside has recorded.")
    parser.add_argument("name", metavar="NAME")
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
    @command(_inside_parser)
    def inside(self, options: argparse.Namespace) -> None:
        """Show what `axon_nb.inside` has recorded: `%inside seen`; norms, attention maps, what a logit lens reads.

        Example: `%inside seen`, after a cell with `with inside.record(model, "layers.*") as seen:`.

        The picture is redrawn after later cells that record again, until it is opened again for the same name.
        """
        cluster = clusters.require("%inside")
        from axon_nb.widgets.open import show_inside

        show_inside(cluster, options.name)


def _memory_parser() -> LineParser:
    parser = LineParser("%memory", "Show what each rank's memory holds.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    return parser


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
    @command(_memory_parser)
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
