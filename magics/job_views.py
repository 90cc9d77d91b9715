"""`%watch` and `%memory`: views of a running job."""

from __future__ import annotations

from IPython.core.magic import Magics, line_magic, magics_class

from axon_nb.cluster import current
from axon_nb.magics.arguments import LineParser, parse

__all__ = ["JobViewMagics"]


@magics_class
class JobViewMagics(Magics):
    """Views of a running job."""

    @line_magic
    def watch(self, line: str) -> None:
        """Show what a job does, while it runs: `%watch`; what `axon_nb.log` tells, pace, communication, memory, ranks.

        Example: `%watch`, in a cell before the one that trains.

        The panel follows the cells that run after it, until it is opened again; its button ends the cell that runs.
        """
        parse(LineParser("%watch", "Show what a job does, while it runs."), line)
        cluster = current.require("%watch")
        from axon_nb.widgets.open_job import show_watch

        show_watch(cluster)

    @line_magic
    def memory(self, line: str) -> None:
        """Show what each rank's memory holds: `%memory [model optimizer …]`; without names, all that variables hold.

        Example: `%memory model optimizer`.

        The panel follows the cells that run after it, until it is opened again for the same names.
        """
        parser = LineParser("%memory", "Show what each rank's memory holds.")
        parser.add_argument("names", nargs="*", metavar="NAME")
        options = parse(parser, line)
        cluster = current.require("%memory")
        from axon_nb.widgets.open_job import show_memory

        show_memory(cluster, options.names)
