"""`%push`, `%pull`, `%scatter` and `%gather`: variables between the notebook and ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class

from axon_nb.cluster.history import identity_check
from axon_nb.cluster.session import current
from axon_nb.errors import UsageError
from axon_nb.magics.arguments import LineParser, parse
from axon_nb.records.ranks import resolve_ranks

__all__ = ["DataMagics"]


def _parser(prog: str, description: str, *, dim: bool = False) -> LineParser:
    parser = LineParser(prog, description)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--ranks", default=None, help="which ranks: 0 or 0,2-3 (default: all)")
    if dim:
        parser.add_argument("--dim", type=int, default=0, help="dimension of tensors and arrays (default: 0)")
    return parser


def _fetching(prog: str, description: str, *, dim: bool = False) -> LineParser:
    parser = _parser(prog, description, dim=dim)
    parser.add_argument("--as", dest="target", default=None, metavar="NAME", help="bind the value to this name")
    parser.add_argument("--force", action="store_true", help="overwrite a variable of the notebook")
    parser.add_argument("--numpy", action="store_true", help="tensors come as NumPy arrays")
    return parser


@magics_class
class DataMagics(Magics):
    """Variables in and out."""

    @line_magic
    def push(self, line: str) -> None:
        """Send notebook variables to ranks: `%push x y [--ranks 0,2-3]`.

        Example: `%push images labels`. Functions bring what they use of the notebook, where a rank has no such name.
        """
        options = parse(_parser("%push", "Send notebook variables to ranks."), line)
        variables = self._own(options)
        current.require("%push").push(variables, ranks=options.ranks)

    @line_magic
    def scatter(self, line: str) -> None:
        """Deal notebook variables out, a part to each rank: `%scatter x [--ranks R] [--dim 0]`.

        Example: `%scatter images labels`. Tensors and arrays are split along --dim, tables by rows, lists by items.
        """
        options = parse(_parser("%scatter", "Deal variables out to ranks.", dim=True), line)
        variables = self._own(options)
        current.require("%scatter").scatter(variables, ranks=options.ranks, dim=options.dim)

    @line_magic
    def pull(self, line: str) -> None:
        """Fetch variables from ranks: `%pull x [--ranks R] [--as NAME] [--force] [--shards] [--numpy]`.

        Example: `%pull losses --ranks 0`. Binds a dict rank -> value, or the value itself when --ranks names a single
        rank. A distributed tensor comes whole, with --shards each rank's own part. A notebook variable of that name is
        overwritten only if an earlier %pull made it, or with --force.
        """
        parser = _fetching("%pull", "Fetch variables from ranks.")
        parser.add_argument("--shards", action="store_true", help="of distributed tensors each rank's own part")
        options = parse(parser, line)
        cluster = current.require("%pull")
        ranks = resolve_ranks(options.ranks, cluster.world_size)
        single = options.ranks is not None and len(ranks) == 1

        def fetch(name: str) -> Any:
            asked: Any = ranks[0] if single else ranks
            value = cluster.pull(name, ranks=asked, shards=options.shards, arrays=options.numpy)
            return value if single else _ByRank(value)

        self._bind(options, fetch)

    @line_magic
    def gather(self, line: str) -> None:
        """Fetch variables and join the ranks' parts: `%gather x [--ranks R] [--dim 0] [--as NAME] [--force] [--numpy]`.

        Example: `%gather predictions --as all_predictions`. What %scatter dealt out comes together again.
        """
        options = parse(_fetching("%gather", "Fetch variables and join them.", dim=True), line)
        cluster = current.require("%gather")
        self._bind(
            options, lambda name: cluster.gather(name, ranks=options.ranks, dim=options.dim, arrays=options.numpy)
        )

    def _own(self, options: argparse.Namespace) -> dict[str, Any]:
        missing = [name for name in options.names if name not in self.shell.user_ns]
        if missing:
            raise UsageError(f"The notebook has no variable {missing[0]!r}: assign it in a plain cell first.")
        return {name: self.shell.user_ns[name] for name in options.names}

    def _bind(self, options: argparse.Namespace, fetch: Callable[[str], Any]) -> None:
        if options.target and len(options.names) > 1:
            raise UsageError(f"--as {options.target} names one variable, and {len(options.names)} are fetched.")
        targets = [options.target or name for name in options.names]
        for target in targets:
            self._may_bind(target, forced=options.force)
        for name, target in zip(options.names, targets, strict=True):
            self.shell.user_ns[target] = value = fetch(name)
            _fetched[target] = identity_check(value)

    def _may_bind(self, name: str, *, forced: bool) -> None:
        if not name.isidentifier():
            raise UsageError(f"{name!r} is no variable name: choose one with --as.")
        space = self.shell.user_ns
        ours = _fetched.get(name, lambda value: False)
        if name in space and not forced and not ours(space[name]):
            raise UsageError(
                f"The notebook already has a variable {name!r}: `--as OTHER_NAME` keeps it, `--force` overwrites it."
            )


class _ByRank(dict[int, Any]):
    """A dictionary that can be recognised later without being kept alive."""


_fetched: dict[str, Callable[[Any], bool]] = {}
"""Tells of the names that %pull and %gather have bound whether a value is the one that they bound."""
