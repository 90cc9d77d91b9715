"""Completes cells that run on ranks, and our own magics, through IPython's public matcher interface.

Once something was completed, the ranks' names are fetched after each cell, so that they can be completed while ranks
do not answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult
from IPython.core.getipython import get_ipython

from axon_nb.cluster.cells.source import RANK_MAGICS
from axon_nb.cluster.session import current
from axon_nb.cluster.session.notebook import NotebookSession
from axon_nb.magics.arguments import LineParser
from axon_nb.magics.cell_head import target_rank
from axon_nb.magics.cells import cell_parser

_MAGIC = re.compile(r"\s*(%%?)(\w+)\s+(.*)$")
_LOCAL = re.compile(r"\s*(%{1,2}\w*|!.*|(import|from)\s.*)$")
"""What the notebook completes without asking a rank: names of magics, shell commands, modules."""
_VALUES = {
    "--backend": ("auto", "shm", "gloo", "nccl"),
    "--devices": ("auto", "cpu"),
    "--engines": ("axon", "local"),
}
"""The possible values of options."""
_REFRESH_DELAY_S = 0.2
"""Names are fetched this long after the last cell, so that consecutive cells are not delayed."""
_TAKES_RANK_NAMES = ("diff", "gather", "pull", "repair", "shards", "sync")
"""Magics and subcommands that accept names of variables on the ranks."""

Match = tuple[str, list[str], str]
"""(text before the cursor to replace, candidates, the type that a front end shows beside them)"""


def rank_matcher(context: CompletionContext) -> SimpleMatcherResult:
    """Complete at one position in a cell; if there are candidates, those of the notebook are suppressed."""
    match = _match(context.full_text, context.cursor_line, context.cursor_position)
    if match is None:
        return {"completions": [], "suppress": False}
    fragment, texts, kind = match
    completions = [SimpleCompletion(text=text, type=kind) for text in texts]
    return {"completions": completions, "matched_fragment": fragment, "suppress": bool(texts)}


# What IPython's decorator `completion_matcher` sets; the highest priority, so that it runs before other matchers.
vars(rank_matcher).update(matcher_priority=1000, matcher_identifier="axon_nb.rank_matcher", matcher_api_version=2)


def _match(text: str, line_number: int, column: int) -> Match | None:
    line = text.split("\n")[line_number]
    before = line[:column]
    if magic := _MAGIC.match(before):
        match = _match_magic(*magic.groups())
        if match is not None or before.startswith("%%") or magic.group(2) in _own_line_magics():
            return match
    if _LOCAL.match(before):
        return None
    session = current.session()
    cluster = session.cluster
    rank = target_rank(text, cluster, session.auto)
    if cluster is None or rank is None:
        return None
    fragment, texts = cluster.completion.complete(rank, line, column)
    if fragment.startswith(".") and all(text.startswith(".") for text in texts):
        fragment, texts = fragment[1:], [text[1:] for text in texts]
    return (fragment, texts, f"rank {rank}") if before.endswith(fragment) else None


def _match_magic(percents: str, name: str, rest: str) -> Match | None:
    words = rest.split()
    partial = "" if not rest or rest[-1].isspace() else words.pop()
    if percents == "%%":
        options = cell_parser(name).options() if name in RANK_MAGICS else []
    elif name == "distributed":
        commands = _commands()
        if not words:
            return partial, _with_prefix(commands, partial), "command"
        name = words.pop(0)
        options = _options(commands.get(name))
    else:
        options = _options(_own_line_magics().get(name))
    if partial.startswith("-"):
        return partial, _with_prefix(options, partial), "option"
    if words and words[-1] in _VALUES:
        return partial, _with_prefix(_VALUES[words[-1]], partial), "value"
    if name == "config":
        return partial, _with_prefix(current.session().settings.assignments(), partial), "setting"
    if name == "auto":
        return partial, _with_prefix(("on", "off"), partial), "value"
    if name in _TAKES_RANK_NAMES and (cluster := current.get()) is not None:
        return partial, _with_prefix(cluster.completion.names(), partial), "rank 0"
    return None


def _commands() -> dict[str, Callable[..., Any]]:
    shell = get_ipython()
    ours = shell.magics_manager.registry.get("DistributedMagics") if shell is not None else None
    return ours.commands() if ours is not None else {}


def _own_line_magics() -> dict[str, Callable[..., Any]]:
    shell = get_ipython()
    magics = shell.magics_manager.magics["line"] if shell is not None else {}
    return {name: magic for name, magic in magics.items() if getattr(magic, "__module__", "").startswith("axon_nb.")}


def _options(command: Callable[..., Any] | None) -> list[str]:
    parser: Callable[[], LineParser] | None = getattr(command, "parser", None)
    return [] if parser is None else parser().options()


def _with_prefix(words: Iterable[str], prefix: str) -> list[str]:
    return sorted(word for word in words if word.startswith(prefix))


class NameRefresh:
    """Fetches the names of the ranks after each cell of a notebook."""

    def __init__(self, session: NotebookSession) -> None:
        self._session = session
        self._timer: asyncio.TimerHandle | None = None

    def after_cell(self, result: Any = None) -> None:
        """Schedule a refresh of the ranks' names; handles IPython's event `post_run_cell`."""
        self.cancel()
        if (cluster := self._session.cluster) is None or not cluster.completion.is_used:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a terminal has no event loop
            self._refresh()
            return
        self._timer = loop.call_later(_REFRESH_DELAY_S, self._refresh)

    def cancel(self) -> None:
        """Cancel the scheduled refresh."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refresh(self) -> None:
        cluster = self._session.cluster
        if cluster is not None:
            cluster.completion.refresh()
