"""`%push`, `%pull`, `%scatter` and `%gather`: variables between the notebook and ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class

from axon_nb.cluster.history import identity_check
from axon_nb.cluster.session import clusters, current
from axon_nb.errors import UsageError
from axon_nb.magics.arguments import LineParser, command
from axon_nb.records.ranks import resolve_ranks


def _parser(
    prog: str, description: str, *, dim: bool = False, fetches: bool = False, shards: bool = False, as_is: bool = False
) -> LineParser:
    parser = LineParser(prog, description)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--ranks", default=None, help="which ranks: 0 or 0,2-3 (default: all)")
    if dim:
        parser.add_argument("--dim", type=int, default=0, help="dimension of tensors and arrays (default: 0)")
    if fetches:
        parser.add_argument("--as", dest="target", default=None, metavar="NAME", help="bind the value to this name")
        parser.add_argument("--force", action="store_true", help="overwrite a variable of the notebook")
        parser.add_argument("--numpy", action="store_true", help="return tensors as NumPy arrays")
    if shards:
        parser.add_argument("--shards", action="store_true", help="fetch distributed tensors as each rank's shard")
    if as_is:
        parser.add_argument(
            "--as-is", action="store_true", help="keep arrays on a GPU, such as CuPy's, instead of NumPy's"
        )
    return parser


@magics_class
class DataMagics(Magics):
    """Moves variables between the notebook and ranks."""

    @line_magic
    @command(lambda: _parser("%push", "Send notebook variables to ranks.", as_is=True))
    def push(self, options: argparse.Namespace) -> None:
        """Send notebook variables to ranks: `%push x y [--ranks 0,2-3] [--as-is]`.

        Example: `%push images labels`. Functions bring the notebook's names that they use, unless a rank has them.
        """
        variables = self._notebook_variables(options)
        clusters.require("%push").push(variables, ranks=options.ranks, as_is=options.as_is)

    @line_magic
    @command(lambda: _parser("%scatter", "Split notebook variables, one part per rank.", dim=True))
    def scatter(self, options: argparse.Namespace) -> None:
        """Split notebook variables, one part per rank: `%scatter x [--ranks R] [--dim 0]`.

        Example: `%scatter images labels`. Tensors and arrays are split along --dim, tables by rows, lists by items.
        """
        variables = self._notebook_variables(options)
        clusters.require("%scatter").scatter(variables, ranks=options.ranks, dim=options.dim)

    @line_magic
    @command(lambda: _parser("%pull", "Fetch variables from ranks.", fetches=True, shards=True, as_is=True))
    def pull(self, options: argparse.Namespace) -> None:
        """Fetch variables from ranks: `%pull x [--ranks R] [--as NAME] [--force] [--shards] [--numpy] [--as-is]`.

        Example: `%pull losses --ranks 0`. Binds a dict from rank to value, or the value itself if --ranks names a
        single rank. A distributed tensor is fetched in full, or with --shards as each rank's shard. A notebook variable
        with the same name is overwritten only if an earlier %pull bound it, or with --force.
        """
        cluster = clusters.require("%pull")
        ranks = resolve_ranks(options.ranks, cluster.world_size)
        single = options.ranks is not None and len(ranks) == 1

        def fetch(name: str) -> Any:
            source: Any = ranks[0] if single else ranks
            value = cluster.pull(name, ranks=source, shards=options.shards, numpy=options.numpy, as_is=options.as_is)
            return value if single else _ByRank(value)

        self._bind(options, fetch)

    @line_magic
    @command(lambda: _parser("%gather", "Fetch variables and join them.", dim=True, fetches=True))
    def gather(self, options: argparse.Namespace) -> None:
        """Fetch variables and join the ranks' parts: `%gather x [--ranks R] [--dim 0] [--as NAME] [--force] [--numpy]`.

        Example: `%gather predictions --as all_predictions`. It joins the parts that %scatter made.
        """
        cluster = clusters.require("%gather")
        self._bind(
            options, lambda name: cluster.gather(name, ranks=options.ranks, dim=options.dim, numpy=options.numpy)
        )

    def _notebook_variables(self, options: argparse.Namespace) -> dict[str, Any]:
        missing = [name for name in options.names if name not in self.shell.user_ns]
        if missing:
            raise UsageError(f"The notebook has no variable {missing[0]!r}: assign it in a plain cell first.")
        return {name: self.shell.user_ns[name] for name in options.names}

    def _bind(self, options: argparse.Namespace, fetch: Callable[[str], Any]) -> None:
        if options.target and len(options.names) > 1:
            raise UsageError(f"--as {options.target} names one variable, but {len(options.names)} are fetched.")
        targets = [options.target or name for name in options.names]
        for target in targets:
            self._check_target(target, force=options.force)
        for name, target in zip(options.names, targets, strict=True):
            self.shell.user_ns[target] = value = fetch(name)
            current.session().fetched[target] = identity_check(value)

    def _check_target(self, name: str, *, force: bool) -> None:
        if not name.isidentifier():
            raise UsageError(f"{name!r} is not a valid variable name: choose one with --as.")
        namespace = self.shell.user_ns
        is_ours = current.session().fetched.get(name, lambda value: False)
        if name in namespace and not force and not is_ours(namespace[name]):
            raise UsageError(
                f"The notebook already has a variable {name!r}: use `--as OTHER_NAME` to keep it, or `--force` to "
                "overwrite it."
            )


class _ByRank(dict[int, Any]):
    """A dictionary that can be weakly referenced, and so recognised later without being kept alive."""
