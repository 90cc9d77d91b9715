"""Exceptions of axon_nb.

AxonError
 ├── UsageError          invalid input or an impossible request: shown as one sentence, without our frames
 │    └── NoClusterError  the command needs a cluster, but none is running
 ├── StartError          the cluster failed to start
 ├── ClusterLostError    the cluster is gone
 └── CellError           a `%%distributed` cell failed on at least one rank
      └── CellTimeoutError  a cell exceeded its `--timeout`

KeyboardInterrupt
 └── CellInterrupt       the user interrupted a cell; the ranks have stopped, or are named
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axon_nb._version import RECORD_VERSION
from axon_nb.troubleshooting import more

__all__ = [
    "AxonError",
    "CellError",
    "CellInterrupt",
    "CellTimeoutError",
    "ClusterLostError",
    "NoClusterError",
    "StartError",
    "UsageError",
]


def _bare_record(state: str, message: str) -> dict[str, Any]:
    return {
        "version": RECORD_VERSION,
        "state": state,
        "cell": None,
        "ranks": "",
        "seconds": None,
        "cause": None,
        "groups": [],
        "verdict": message,
        "hint": "",
        "next": [],
    }


class AxonError(Exception):
    """Base class of axon_nb's own exceptions.

    In a notebook only the message is shown, and the name of its entry on the troubleshooting page: it gives the value,
    the rule and the fix, and our frames would not help.
    """

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}", *more(str(self)), *getattr(self, "__notes__", ())]


class UsageError(AxonError, ValueError):
    """Invalid input or an impossible request; the message gives the fix."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class NoClusterError(UsageError):
    """The command needs a cluster, but none is running."""

    def __init__(self, command: str = "This", *, kept: str = "") -> None:
        super().__init__(f"{command} needs a cluster, but none is running. Run `%distributed start` first.{kept}")
        self.kept = kept
        """What other kernels left running, as a sentence; empty if nothing."""


class StartError(AxonError, RuntimeError):
    """The cluster failed to start."""


class ClusterLostError(AxonError, RuntimeError):
    """The cluster is gone: its controller or host agent ended."""


class CellError(AxonError, RuntimeError):
    """A cell failed on at least one rank; shows the root cause's traceback first, then the other ranks."""

    failure: object | None = None
    """What happened on each rank, as `axon_nb.cluster.failures.Failure`; None if it is not known."""
    record: Mapping[str, Any] | None = None
    """What `to_dict` returns; None if no cell ran."""

    def __init__(self, message: str, report: Sequence[str] = (), *, in_card: Sequence[str] = ()) -> None:
        super().__init__(message)
        self._report, self._in_card = list(report) or [message], list(in_card)

    def take_card(self) -> list[str]:
        """Return the lines that a card of the failure says, too, and leave them out of the traceback from now on."""
        lines, self._in_card = self._in_card, []
        return lines

    def _render_traceback_(self) -> list[str]:
        return [*self._report, *self._in_card]

    def to_dict(self) -> dict[str, Any]:
        """Return the failed cell as plain JSON values, which `axon_nb/records/cell_result.schema.json` describes."""
        return dict(self.record or _bare_record("failed", str(self)))


class CellInterrupt(KeyboardInterrupt):
    """The user interrupted a cell. A KeyboardInterrupt: Run All stops, and `except Exception` does not catch it."""

    def __init__(self, message: str, report: Sequence[str] = ()) -> None:
        super().__init__(message)
        self._report = [f"KeyboardInterrupt: {message}", *report]
        self.record: Mapping[str, Any] | None = None
        """What `to_dict` returns; None if no cell ran."""

    def _render_traceback_(self) -> list[str]:
        return self._report

    def to_dict(self) -> dict[str, Any]:
        """Return the interrupted cell as plain JSON values, as `CellError.to_dict` does."""
        return dict(self.record or _bare_record("interrupted", str(self)))


class CellTimeoutError(CellError, TimeoutError):
    """A cell exceeded its `--timeout`."""
