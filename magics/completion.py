"""Completions in cells that run on ranks, and of our own magics: a matcher of IPython's public matcher interface.

After each cell the names of ranks are asked for, so that they can be completed while ranks do not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult
from IPython.core.getipython import get_ipython

from axon_nb.cluster.inspection import completion
from axon_nb.cluster.session import current
from axon_nb.cluster.settings import settings
from axon_nb.magics.arguments import HelpAsked
from axon_nb.magics.cell_head import RANK_MAGICS, target_rank
from axon_nb.magics.cells import cell_parser

__all__ = ["after_cell", "forget", "rank_matcher"]

_MAGIC = re.compile(r"\s*(%%?)(\w+)\s+(.*)$")
_NOTEBOOKS = re.compile(r"\s*(%{1,2}\w*|!.*|(import|from)\s.*)$")
"""What is the same in the notebook, which need not ask: names of magics, commands of the shell, modules."""
_VALUES = {
    "--backend": ("auto", "gloo", "nccl"),
    "--devices": ("auto", "cpu"),
    "--engines": ("axon", "local", "mpi", "ssh", "slurm"),
}
"""What can stand behind an option."""
_RANK_NAMES = ("diff", "gather", "pull", "repair", "shards", "sync")
"""Magics and sub-commands that take names of variables of ranks."""

Found = tuple[str, list[str], str]
"""(text before the cursor that is replaced, what by, what a front end shows beside each)"""


def rank_matcher(context: CompletionContext) -> SimpleMatcherResult:
    """IPython's completions for one place in a cell; where there are some, nothing of the notebook's is mixed in."""
    found = _find(context.full_text, context.cursor_line, context.cursor_position)
    if found is None:
        return {"completions": [], "suppress": False}
    fragment, texts, kind = found
    completions = [SimpleCompletion(text=text, type=kind) for text in texts]
    return {"completions": completions, "matched_fragment": fragment, "suppress": bool(texts)}


# What IPython's decorator `completion_matcher` sets; above all others, which then need not be asked.
vars(rank_matcher).update(matcher_priority=1000, matcher_identifier="axon_nb.rank_matcher", matcher_api_version=2)


def _find(text: str, line_number: int, column: int) -> Found | None:
    line = text.split("\n")[line_number]
    before = line[:column]
    if match := _MAGIC.match(before):
        found = _of_magic(*match.groups())
        if found is not None or before.startswith("%%") or match.group(2) in _own_line_magics():
            return found
    if _NOTEBOOKS.match(before):
        return None
    cluster = current.get()
    rank = target_rank(text, cluster.world_size) if cluster is not None else None
    if cluster is None or rank is None:
        return None
    fragment, texts = completion.client_for(cluster.state).complete(rank, line, column)
    if fragment.startswith(".") and all(text.startswith(".") for text in texts):
        fragment, texts = fragment[1:], [text[1:] for text in texts]
    return (fragment, texts, f"rank {rank}") if before.endswith(fragment) else None


def _of_magic(percents: str, name: str, rest: str) -> Found | None:
    words = rest.split()
    partial = "" if not rest or rest[-1].isspace() else words.pop()
    if percents == "%%":
        options = cell_parser(name).options() if name in RANK_MAGICS else []
    elif name == "distributed":
        commands = _commands()
        if not words:
            return partial, _beginning(commands, partial), "command"
        name = words.pop(0)
        options = _options(commands.get(name), [])
    else:
        options = _options(_own_line_magics().get(name), "")
    if partial.startswith("-"):
        return partial, _beginning(options, partial), "option"
    if words and words[-1] in _VALUES:
        return partial, _beginning(_VALUES[words[-1]], partial), "value"
    if name == "config":
        return partial, _beginning(settings.assignments(), partial), "setting"
    if name == "auto":
        return partial, _beginning(("on", "off"), partial), "value"
    if name in _RANK_NAMES and (cluster := current.get()) is not None:
        return partial, _beginning(completion.client_for(cluster.state).names(), partial), "rank 0"
    return None


def _commands() -> dict[str, Callable[..., Any]]:
    shell = get_ipython()
    ours = shell.magics_manager.registry.get("DistributedMagics") if shell is not None else None
    return ours.commands() if ours is not None else {}


def _own_line_magics() -> dict[str, Callable[..., Any]]:
    shell = get_ipython()
    found = shell.magics_manager.magics["line"] if shell is not None else {}
    return {name: magic for name, magic in found.items() if getattr(magic, "__module__", "").startswith("axon_nb.")}


def _options(command: Callable[..., Any] | None, empty: Any) -> list[str]:
    """The options of a command: each parses its words before it does anything, and asked for help tells its parser."""
    if command is None:
        return []
    asked_for = inspect.unwrap(command)
    with contextlib.suppress(Exception):
        try:
            asked_for([*empty, "--help"] if isinstance(empty, list) else "--help")
        except HelpAsked as asked:
            return asked.parser.options()
    return []


def _beginning(words: Iterable[str], partial: str) -> list[str]:
    return sorted(word for word in words if word.startswith(partial))


_QUIET_S = 0.2
"""The ranks are asked when no other cell has ended for so long: cells that follow each other are not held up."""
_timers: list[asyncio.TimerHandle] = []


def after_cell(result: Any = None) -> None:
    """A cell of the notebook has ended; IPython's event `post_run_cell`."""
    forget()
    if current.get() is None:
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # a terminal
        _refresh()
        return
    _timers.append(loop.call_later(_QUIET_S, _refresh))


def forget() -> None:
    """Ask no more for what has run so far."""
    while _timers:
        _timers.pop().cancel()


def _refresh() -> None:
    cluster = current.get()
    if cluster is not None:
        completion.client_for(cluster.state).refresh()
