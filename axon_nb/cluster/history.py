"""What this process's notebook has done on ranks, kept for the export to a script; texts alone, never large values.

Recognising an object later without keeping it alive.
"""

from __future__ import annotations

import ast
import contextlib
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from IPython.core.inputtransformer2 import TransformerManager

from axon_nb.records.history import ExecutedCell, PushedValues, SessionFacts

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

__all__ = [
    "auto_options",
    "failed_line",
    "history",
    "literal",
    "pushed",
    "ran",
    "recogniser",
    "sent_values",
    "session_facts",
    "started",
]


def recogniser(value: Any) -> Callable[[Any], bool]:
    """A function that tells whether an object is this one, which it does not keep alive."""
    try:
        reference = weakref.ref(value)
    except TypeError:  # numbers, texts, lists: their address may be another object's when they are gone
        identity = id(value)
        return lambda other: id(other) == identity
    return lambda other: reference() is other


_MAGICS = ("distributed", "rank")
_AUTO_CALL = "get_ipython().magics_manager.registry['AutoMagics'].run"
_MAX_LITERAL = 200
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_facts: list[SessionFacts] = []
_entries: list[ExecutedCell | PushedValues] = []
_auto_options = [""]
_sent: dict[str, Callable[[Any], bool]] = {}
"""Tells whether a value is the one that was last sent under a name."""


def started(state: ClusterState) -> None:
    """A cluster is the notebook's own now: what was done on earlier ranks is gone with them."""
    _facts[:] = [session_facts(state)]
    _entries[:] = [entry for entry in _entries if isinstance(entry, ExecutedCell) and not entry.magic]
    _sent.clear()


def session_facts(state: ClusterState) -> SessionFacts:
    """What a script must know of the ranks to do what they do."""
    layout = state.layout
    seeds = {place.seed for place in state.places}  # forked ranks begin with the same one
    seed = seeds.pop() if len(seeds) == 1 else None
    return SessionFacts(layout.num_ranks, layout.backend, layout.threads, layout.devices[0] != "cpu", seed)


def pushed(variables: Mapping[str, Any], ranks: Iterable[int], *, scatter_dim: int | None = None) -> None:
    """Variables were sent to ranks."""
    chosen: tuple[int, ...] | None = tuple(ranks)
    if _facts and chosen == tuple(range(_facts[0].num_ranks)):
        chosen = None
    literals = {name: text for name, value in variables.items() if (text := literal(value))}
    _entries.append(PushedValues(tuple(variables), chosen, scatter_dim, literals))
    for name, value in variables.items():
        _sent[name] = recogniser(value)


def literal(value: Any) -> str:
    """Source text that gives this value; empty: it has none, or a long one."""
    text = repr(value) if type(value) in (bool, int, float, str, type(None), tuple, list, dict) else ""
    with contextlib.suppress(SyntaxError, ValueError, MemoryError, RecursionError):
        if 0 < len(text) <= _MAX_LITERAL and ast.literal_eval(text) == value:
            return text
    return ""


def ran(result: Any) -> None:
    """IPython's `post_run_cell`: a cell has ended."""
    info = getattr(result, "info", None)
    source = getattr(info, "raw_cell", None)
    if info is None or not source or not info.store_history:
        return
    error = result.error_before_exec or result.error_in_exec
    magic, code = _on_ranks(info)
    outcome = "ok" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    render = getattr(error, "_render_traceback_", None)
    report = "\n".join(render()) if render is not None else ""
    line = failed_line(report, result.execution_count) if outcome == "failed" else None
    if line is not None and not source.lstrip().startswith("%%"):
        line += 1  # no first line of a magic's was sent
    _auto_options[0] = auto_options(source, _auto_options[0])
    _entries.append(ExecutedCell(result.execution_count, magic, code or source, outcome, line, _one_line(error)))


def auto_options(code: str, before: str) -> str:
    """What `%distributed auto on` in this code says of the cells after it, such as ``--ranks 0``."""
    found = re.findall(r"^%distributed auto on\b(.*)$", code, re.MULTILINE)
    return str(found[-1]).strip() if found else before


def _on_ranks(info: Any) -> tuple[str, str]:
    """The first line's text and the code of a cell that ran on ranks; both empty: it did not."""
    text = getattr(info, "transformed_cell", None)
    if not text:
        text = TransformerManager().transform_cell(info.raw_cell)
    try:
        tree = compile(text, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
    except (SyntaxError, ValueError):
        return "", ""
    statement = tree.body[0] if isinstance(tree, ast.Module) and len(tree.body) == 1 else None
    value = getattr(statement, "value", None)
    call = value.value if isinstance(value, ast.Await) else value
    words = [str(getattr(argument, "value", "")) for argument in getattr(call, "args", ())]
    if len(words) == 3 and words[0] in _MAGICS and "get_ipython()" in text:
        return f"{words[0]} {words[1]}".strip(), words[2]
    if len(words) == 1 and text.lstrip().removeprefix("await ").startswith(_AUTO_CALL):
        return f"distributed {_auto_options[0]}".strip(), words[0]
    return "", ""


def failed_line(report: str, number: int | None) -> int | None:
    """The line of a cell's code at which it failed, as told by a traceback; its first line is the magic's.

    Args:
        report: The traceback as shown.
        number: The cell's prompt.
    """
    found = re.search(rf"Cell In\[{number}\], line (\d+)", _ANSI.sub("", report))
    return int(found.group(1)) - 1 if found else None


def _one_line(error: BaseException | None) -> str:
    return "" if error is None else (str(error).splitlines() or [type(error).__name__])[0]


def history() -> tuple[SessionFacts | None, list[ExecutedCell | PushedValues]]:
    """The ranks of the notebook's latest cluster, and what was done on them; None: there was no cluster."""
    return (_facts[0] if _facts else None), list(_entries)


def sent_values(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Values that were sent to ranks and that `namespace` still has under the same name."""
    return {name: namespace[name] for name, same in _sent.items() if name in namespace and same(namespace[name])}
