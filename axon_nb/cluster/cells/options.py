"""What a caller may say about one cell; the keyword arguments of `Cluster.run` and its kin.

What a running cell is made of: each rank's part in it, and what goes on beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypedDict

from axon_nb.cluster.failures.report import RankError
from axon_nb.records.protocol.cells import Interruption, Measurement

__all__ = ["CellOptions", "LiveView", "Part", "Stepped", "was_ended", "where_ended"]

_ENDED = ("Aborted",)
_ENDED_WHEN_BEGUN = ("KeyboardInterrupt", "CancelledError")
_NCCL_ABORTED = "NCCL communicator was aborted"
"""What torch says of an operation that begins on an aborted communicator."""
_IDLE_WAIT_S = 5.0
"""After a rank's reply its last output is waited for at most this long: the two come by different ways, and on a busy
machine one of them may be late."""
_GONE_WAIT_S = 0.5
"""So long when the rank's process is gone."""


class Stepped(Protocol):
    """Something that goes on a little at each call, such as a recovery."""

    def step(self) -> bool:
        """Do what is due; True when it is over."""


class LiveView(Protocol):
    """A view that is fed while the cell runs; flushed on the notebook's thread."""

    def flush(self) -> None:
        """Show what has come since."""

    def rank_over(self, rank: int, *, failed: bool) -> None:
        """From any thread: a rank has ended the cell."""


@dataclass(slots=True)
class Part:
    """One rank's part in the cell."""

    replied_at: float = 0.0
    idle: bool = False
    gone_at: float = 0.0
    """When its process was seen to be gone; 0: it has not been."""
    error: RankError | None = None
    seconds: float = 0.0
    has_value: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether its rank answers no more: its process has ended, or it was given up."""
        return bool(self.gone_at) or (self.error is not None and self.error.kind == "stuck")

    def over(self, now: float) -> bool:
        """Whether it has replied and has sent its output, or has had its time to."""
        if self.idle or not self.replied_at:
            return bool(self.replied_at)
        since, limit = (self.gone_at, _GONE_WAIT_S) if self.gone_at else (self.replied_at, _IDLE_WAIT_S)
        return now - since > limit


def was_ended(name: str, words: str, *, begun: bool) -> bool:
    """Whether a rank's exception is that it was ended, and not a failure of its own.

    Args:
        name: Of the exception.
        words: What it says.
        begun: Whether the ranks were told to end.
    """
    return name in _ENDED or (begun and (name in _ENDED_WHEN_BEGUN or _NCCL_ABORTED in words))


def where_ended(place: Interruption | None) -> str:
    """What a rank did when its cell was ended from outside."""
    line = f" at line {place.line}" if place is not None and place.line else ""
    return f"waited in {place.call}{line}" if place is not None and place.call else f"was interrupted{line}"


class CellOptions(TypedDict, total=False):
    """Each may be left out."""

    ranks: str | Iterable[int] | None
    """Which ranks, such as ``"0,2-3"`` or ``[0, 2]``; None, the default: all."""
    quiet: bool
    """Show nothing; what ranks print is in the result's `text`."""
    timeout: float | None
    """Limit in seconds; None, the default: none."""
    check: bool
    """Raise when a rank fails, the default; otherwise the failures are in the result's `errors`."""
    cell: int | None
    """Number that tracebacks name the code by; None, the default: a running number."""
    view: LiveView | None
    """A live view to flush while the cell runs."""
    alone: bool
    """Whether no other cell is sent before this one is over, so that communication with ranks that do not run it can be
    refused at once; not the default."""
    values: bool
    """Whether to fetch the values of the last expression; the default."""
    show_value: bool
    """Whether to show them as well; not the default."""
    measurement: Measurement
    """What ranks measure of the cell; nothing by default."""
    is_debugger: bool
    """Whether this is a command of the debugger, which leaves the failure on the rank; not the default."""
