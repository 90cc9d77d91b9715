"""The history of what this notebook did on ranks, for the export to a script: text only, never large values."""

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
    "identity_check",
    "literal",
    "record_cell",
    "record_push",
    "record_start",
    "sent_values",
    "session_facts",
]


def identity_check(value: Any) -> Callable[[Any], bool]:
    """Return a function that checks whether an object is `value`, without keeping `value` alive."""
    try:
        reference = weakref.ref(value)
    except TypeError:  # numbers, strings, lists: once they are freed, another object may have their address
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
"""By name, checks whether a value is the one that was last sent under it."""


def record_start(state: ClusterState) -> None:
    """Record that the notebook has a new cluster; what was done on earlier ranks is dropped, as they are gone."""
    _facts[:] = [session_facts(state)]
    _entries[:] = [entry for entry in _entries if isinstance(entry, ExecutedCell) and not entry.magic]
    _sent.clear()


def session_facts(state: ClusterState) -> SessionFacts:
    """Return what a script needs to know about the ranks to do the same as they do."""
    layout = state.layout
    seeds = {info.seed for info in state.rank_info}  # forked ranks start with the same one
    seed = seeds.pop() if len(seeds) == 1 else None
    return SessionFacts(layout.num_ranks, layout.backend, layout.threads, layout.devices[0] != "cpu", seed)


def record_push(variables: Mapping[str, Any], ranks: Iterable[int], *, scatter_dim: int | None = None) -> None:
    """Record variables that were sent to ranks."""
    chosen: tuple[int, ...] | None = tuple(ranks)
    if _facts and chosen == tuple(range(_facts[0].num_ranks)):
        chosen = None
    literals = {name: text for name, value in variables.items() if (text := literal(value))}
    _entries.append(PushedValues(tuple(variables), chosen, scatter_dim, literals))
    for name, value in variables.items():
        _sent[name] = identity_check(value)


def literal(value: Any) -> str:
    """Return source text that evaluates to this value; empty if there is none, or only a long one."""
    text = repr(value) if type(value) in (bool, int, float, str, type(None), tuple, list, dict) else ""
    with contextlib.suppress(SyntaxError, ValueError, MemoryError, RecursionError):
        if 0 < len(text) <= _MAX_LITERAL and ast.literal_eval(text) == value:
            return text
    return ""


def record_cell(result: Any) -> None:
    """Record a finished cell; called as IPython's `post_run_cell`."""
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
        line += 1  # the cell has no magic line, which `failed_line` leaves out
    _auto_options[0] = auto_options(source, _auto_options[0])
    _entries.append(ExecutedCell(result.execution_count, magic, code or source, outcome, line, _one_line(error)))


def auto_options(code: str, before: str) -> str:
    """Return the options that the last `%distributed auto on` in this code sets for later cells, such as ``--ranks 0``.

    Args:
        code: The code of a cell.
        before: The options before it, returned if the code sets none.
    """
    found = re.findall(r"^%distributed auto on\b(.*)$", code, re.MULTILINE)
    return str(found[-1]).strip() if found else before


def _on_ranks(info: Any) -> tuple[str, str]:
    """Return the magic line and the code of a cell that ran on ranks; both are empty if it did not."""
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
    """Return the line of a cell's code at which it failed, according to a traceback; not counting the magic line.

    Args:
        report: The traceback as shown.
        number: The cell's prompt.
    """
    found = re.search(rf"Cell In\[{number}\], line (\d+)", _ANSI.sub("", report))
    return int(found.group(1)) - 1 if found else None


def _one_line(error: BaseException | None) -> str:
    return "" if error is None else (str(error).splitlines() or [type(error).__name__])[0]


def history() -> tuple[SessionFacts | None, list[ExecutedCell | PushedValues]]:
    """Return facts of the notebook's latest cluster (None: there was none), and what was done on its ranks."""
    return (_facts[0] if _facts else None), list(_entries)


def sent_values(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that were sent to ranks and are still in `namespace` under the same name."""
    return {name: namespace[name] for name, same in _sent.items() if name in namespace and same(namespace[name])}
