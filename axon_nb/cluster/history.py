"""The history of what this notebook did on ranks, for the export to a script: text only, never large values."""

from __future__ import annotations

import ast
import contextlib
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from axon_nb.records.history import ExecutedCell, PushedValues, SessionFacts, without_undone

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

_MAX_LITERAL = 200
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def identity_check(value: Any) -> Callable[[Any], bool]:
    """Return a function that checks whether an object is `value`, without keeping `value` alive."""
    try:
        reference = weakref.ref(value)
    except TypeError:  # numbers, strings, lists: once they are freed, another object may have their address
        identity = id(value)
        return lambda other: id(other) == identity
    return lambda other: reference() is other


def session_facts(state: ClusterState) -> SessionFacts:
    """Return what a script needs to know about the ranks to do the same as they do."""
    layout = state.layout
    seeds = {info.seed for info in state.rank_info}  # forked ranks start with the same one
    seed = seeds.pop() if len(seeds) == 1 else None
    return SessionFacts(layout.num_ranks, layout.backend, layout.threads, layout.devices[0] != "cpu", seed)


def literal(value: Any) -> str:
    """Return source text that evaluates to this value; empty if there is none, or only a long one."""
    text = repr(value) if type(value) in (bool, int, float, str, type(None), tuple, list, dict) else ""
    with contextlib.suppress(SyntaxError, ValueError, MemoryError, RecursionError):
        if 0 < len(text) <= _MAX_LITERAL and ast.literal_eval(text) == value:
            return text
    return ""


def failed_line(report: str, number: int | None) -> int | None:
    """Return the line of a cell's code at which it failed, according to a traceback; not counting the magic line.

    Args:
        report: The traceback as shown.
        number: The cell's prompt.
    """
    match = re.search(rf"Cell In\[{number}\], line (\d+)", _ANSI.sub("", report))
    return int(match.group(1)) - 1 if match else None


def _one_line(error: BaseException | None) -> str:
    return "" if error is None else (str(error).splitlines() or [type(error).__name__])[0]


class RankCell(Struct, frozen=True):
    """A cell that is sent to ranks."""

    magic: str
    """Its first line after %%, such as ``distributed --ranks 0``; in auto mode, the line that it would need."""
    code: str
    """Its code without that line."""


class History:
    """What one notebook did on its ranks, in order."""

    def __init__(self) -> None:
        self._facts: SessionFacts | None = None
        self._entries: list[ExecutedCell | PushedValues] = []
        self._next: RankCell | None = None
        """The cell that runs, or is about to; None: it stays in the notebook."""
        self._sent: dict[str, Callable[[Any], bool]] = {}
        """By name, checks whether a value is the one that was last sent under it."""

    def record_start(self, facts: SessionFacts) -> None:
        """Record that the notebook has a new cluster; what was done on earlier ranks is dropped, as they are gone."""
        self._facts = facts
        self._entries = [entry for entry in self._entries if isinstance(entry, ExecutedCell) and not entry.magic]
        self._sent.clear()

    def record_resize(self, facts: SessionFacts) -> None:
        """Record that the cluster has another number of ranks now; what was done before stays."""
        self._facts = facts

    def record_push(
        self, variables: Mapping[str, Any], ranks: Iterable[int], *, scatter_dim: int | None = None
    ) -> None:
        """Record variables that were sent to ranks."""
        receivers: tuple[int, ...] | None = tuple(ranks)
        if self._facts is not None and receivers == tuple(range(self._facts.num_ranks)):
            receivers = None
        literals = {name: text for name, value in variables.items() if (text := literal(value))}
        self._entries.append(PushedValues(tuple(variables), receivers, scatter_dim, literals))
        self._sent.update({name: identity_check(value) for name, value in variables.items()})

    def record_undo(self, report: str) -> None:
        """Record that ranks have taken cells back, as `report` says."""
        if self._facts is not None:
            self._entries = without_undone(self._entries, report, self._facts.num_ranks)

    def expect(self, cell: RankCell | None) -> None:
        """Note that the next cell is sent to ranks; None: it is not."""
        self._next = cell

    def record_cell(self, result: Any) -> None:
        """Record a finished cell; called as IPython's `post_run_cell`."""
        info = getattr(result, "info", None)
        source = getattr(info, "raw_cell", None)
        if info is None or not source or not info.store_history:
            return
        error = result.error_before_exec or result.error_in_exec
        sent, self._next = self._next, None
        magic, code = (sent.magic, sent.code) if sent is not None else ("", source)
        outcome = "ok" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        render = getattr(error, "_render_traceback_", None)
        report = "\n".join(render()) if render is not None else ""
        line = failed_line(report, result.execution_count) if outcome == "failed" else None
        if line is not None and not source.lstrip().startswith("%%"):
            line += 1  # the cell has no magic line, which `failed_line` leaves out
        self._entries.append(ExecutedCell(result.execution_count, magic, code, outcome, line, _one_line(error)))

    def entries(self) -> tuple[SessionFacts | None, list[ExecutedCell | PushedValues]]:
        """Return facts of the notebook's latest cluster (None: there was none), and what was done on its ranks."""
        return self._facts, list(self._entries)

    def sent_values(self, namespace: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that were sent to ranks and are still in `namespace` under the same name."""
        return {
            name: namespace[name] for name, same in self._sent.items() if name in namespace and same(namespace[name])
        }
