"""The exceptions of axon_nb.

AxonError
 ├── UsageError          what was asked for cannot be: shown as one sentence, without our frames
 │    └── NoClusterError      the command needs a cluster and none is running
 ├── StartError          the cluster did not come up
 ├── ClusterLostError         the cluster was there and is no longer
 └── CellError           a `%%distributed` cell failed on at least one rank
      └── CellTimeoutError    a cell did not end within its `--timeout`

KeyboardInterrupt
 └── CellInterrupt       the user interrupted a cell; the ranks have stopped, or are named
"""

from __future__ import annotations

from collections.abc import Sequence

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


class AxonError(Exception):
    """Base of everything that axon_nb raises on its own account.

    In a notebook it shows as its message alone: the message gives the value, the rule and the fix, and our
    frames would not help the reader.
    """

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class UsageError(AxonError, ValueError):
    """What was asked for cannot be; the message says what can."""


class NoClusterError(UsageError):
    """The command needs a cluster and none is running."""

    def __init__(self, command: str = "This") -> None:
        super().__init__(f"{command} needs a cluster and none is running here: start one with `%distributed start`.")


class StartError(AxonError, RuntimeError):
    """The cluster did not come up."""


class ClusterLostError(AxonError, RuntimeError):
    """The cluster was there and is no longer."""


class CellError(AxonError, RuntimeError):
    """A cell failed on at least one rank; shows the root cause's traceback first, then the other ranks."""

    def __init__(self, message: str, report: Sequence[str] = ()) -> None:
        super().__init__(message)
        self._report = list(report) or [message]

    def _render_traceback_(self) -> list[str]:
        return self._report


class CellInterrupt(KeyboardInterrupt):
    """The user interrupted a cell. A KeyboardInterrupt, so that Run All stops and no `except Exception` keeps it."""

    def __init__(self, message: str, report: Sequence[str] = ()) -> None:
        super().__init__(message)
        self._report = [f"KeyboardInterrupt: {message}", *report]

    def _render_traceback_(self) -> list[str]:
        return self._report


class CellTimeoutError(CellError, TimeoutError):
    """A cell did not end within its `--timeout`."""
