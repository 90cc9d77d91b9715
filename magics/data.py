"""`%push` and `%pull`: variables between the notebook and ranks."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class

from axon_nb.cluster import current
from axon_nb.cluster.ranks import resolve_ranks
from axon_nb.errors import UsageError
from axon_nb.magics.arguments import LineParser, parse

__all__ = ["DataMagics"]


def _push_parser() -> LineParser:
    parser = LineParser("%push", "Send notebook variables to ranks.")
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--ranks", default=None, help="which ranks: 0 or 0,2-3 (default: all)")
    return parser


def _pull_parser() -> LineParser:
    parser = LineParser("%pull", "Fetch variables from ranks.")
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--ranks", default=None, help="which ranks: 0 or 0,2-3 (default: all)")
    parser.add_argument("--as", dest="target", default=None, metavar="NAME", help="bind the value to this name")
    parser.add_argument("--force", action="store_true", help="overwrite a variable of the notebook")
    return parser


@magics_class
class DataMagics(Magics):
    """Variables in and out."""

    @line_magic
    def push(self, line: str) -> None:
        """Send notebook variables to ranks: `%push x y [--ranks 0,2-3]`."""
        options = parse(_push_parser(), line)
        missing = [name for name in options.names if name not in self.shell.user_ns]
        if missing:
            raise UsageError(f"The notebook has no variable {missing[0]!r}: assign it in a plain cell first.")
        cluster = current.require("%push")
        cluster.push({name: self.shell.user_ns[name] for name in options.names}, ranks=options.ranks)

    @line_magic
    def pull(self, line: str) -> None:
        """Fetch variables from ranks: `%pull x [--ranks R] [--as NAME] [--force]`.

        Binds a dict rank -> value, or the value itself when --ranks names a single rank. A notebook variable of that
        name is overwritten only if an earlier %pull made it, or with --force.
        """
        options = parse(_pull_parser(), line)
        if options.target and len(options.names) > 1:
            raise UsageError(f"--as {options.target} names one variable, and {len(options.names)} are pulled.")
        cluster = current.require("%pull")
        ranks = resolve_ranks(options.ranks, cluster.world_size)
        single = options.ranks is not None and len(ranks) == 1
        for name in options.names:
            target = options.target or name
            self._may_bind(target, forced=options.force)
            value: Any = cluster.pull(name, ranks=ranks[0] if single else ranks)
            self.shell.user_ns[target] = value
            _pulled[target] = id(value)

    def _may_bind(self, name: str, *, forced: bool) -> None:
        if not name.isidentifier():
            raise UsageError(f"{name!r} is no variable name: choose one with --as.")
        space = self.shell.user_ns
        if name in space and _pulled.get(name) != id(space[name]) and not forced:
            raise UsageError(
                f"The notebook already has a variable {name!r}: `--as OTHER_NAME` keeps it, `--force` overwrites it."
            )


_pulled: dict[str, int] = {}
"""Names that %pull has bound, with the identity of what it bound."""
