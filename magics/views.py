"""`%shards`: views of what the ranks hold and do."""

from __future__ import annotations

from IPython.core.magic import Magics, line_magic, magics_class

from axon_nb.cluster import current
from axon_nb.magics.arguments import LineParser, parse

__all__ = ["ViewMagics"]


def _shards_parser() -> LineParser:
    parser = LineParser("%shards", "Show which rank holds which part of a tensor.")
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--gradients", action="store_true", help="gradients besides parameters")
    return parser


@magics_class
class ViewMagics(Magics):
    """Views of a cluster."""

    @line_magic
    def shards(self, line: str) -> None:
        """Show which rank holds which part: `%shards model [--gradients]`; modules, optimizers, tensors of the ranks.

        Example: `%shards model optimizer`.

        The view follows the cells that run after it, until it is opened again for the same names.
        """
        options = parse(_shards_parser(), line)
        cluster = current.require("%shards")
        from axon_nb.widgets.open_panels import show_shards

        show_shards(cluster, options.names, gradients=options.gradients)
