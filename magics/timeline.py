"""`%timeline`: what each rank does, span by span."""

from __future__ import annotations

from IPython.core.magic import Magics, line_magic, magics_class

from axon_nb.cluster import current
from axon_nb.cluster.ranks import resolve_ranks
from axon_nb.magics.arguments import LineParser, parse

__all__ = ["TimelineMagics"]


def _parser() -> LineParser:
    parser = LineParser("%timeline", "Show what each rank does.")
    parser.add_argument("--ranks", default=None, help="which ranks: 0 or 0,2-3 (default: all)")
    parser.add_argument("--cell", type=int, default=None, metavar="N", help="In [N] alone, which is over")
    parser.add_argument("--save", default=None, metavar="FILE", help="write .json (Perfetto), .html or .csv instead")
    return parser


@magics_class
class TimelineMagics(Magics):
    """The timeline of a cluster."""

    @line_magic
    def timeline(self, line: str) -> None:
        """Show what each rank does: `%timeline [--ranks 0,2-3] [--cell N] [--save FILE]`.

        Forwards, backwards, optimizer steps, collectives, waiting; a pipeline's last step beside its ideal. The view
        follows the cells that run after it, until it is opened again.

        --ranks RANKS   which ranks, such as 0 or 0,2-3; default: all
        --cell N        the cell In [N] alone, which is over
        --save FILE     write it instead: .json is a trace for Perfetto, .html a page of its own, .csv a table

        Example: `%timeline --ranks 0-1`, or `%timeline --save trace.json`.
        """
        options = parse(_parser(), line)
        cluster = current.require("%timeline")
        ranks = resolve_ranks(options.ranks, cluster.world_size)
        if options.save is None:
            from axon_nb.widgets.open_timeline import show_timeline

            show_timeline(cluster, ranks, cell=options.cell)
            return
        from axon_nb.widgets.timeline_record import Timeline

        Timeline(cluster, ranks, cell=options.cell).save(options.save)
        print(f"Saved the timeline as {options.save}.")
