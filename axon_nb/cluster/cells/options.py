"""The options of a cell (keyword arguments of `Cluster.run` and its variants), and the state of each rank in a cell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from msgspec import Struct

from axon_nb.cluster.failures import RankError
from axon_nb.records.protocol.cells import AbortLocation, CellEnd, Measurement, Pauses
from axon_nb.records.protocol.inspection import PausedEvent
from axon_nb.records.telemetry import Activity

if TYPE_CHECKING:
    from axon_nb.cluster.snapshot import Trials

_ABORTED = ("AbortedError",)
_ABORTED_ON_REQUEST = ("KeyboardInterrupt", "CancelledError")
_ABORT_MESSAGES = ("NCCL communicator was aborted", "AbortedError: ")
"""What torch raises for an operation on an aborted communicator, and for a failed future in a backward."""
_OUTPUT_TIMEOUT_S = 5.0
"""How long to wait for a rank's last output after its reply and after earlier output: the two take different routes,
and on a busy machine one of them may be late."""
_MAX_OUTPUT_TIMEOUT_S = 60.0
"""The same, however much output there is."""
_DEAD_OUTPUT_TIMEOUT_S = 0.5
"""How long to wait for it if the rank's process is gone."""


class Steppable(Protocol):
    """Work that advances a little at each call, such as a recovery."""

    def step(self) -> bool:
        """Do what is due; return True once done."""


class LiveView(Protocol):
    """A view that is updated while the cell runs; flushed on the notebook's thread."""

    def flush(self) -> None:
        """Show what has arrived since the last call."""

    def rank_ended(self, rank: int, activity: Activity, at: AbortLocation | None) -> None:
        """Record, from any thread, how the cell ended on a rank: done, failed, dead, or stopped at a location."""


class CellDebugger(Protocol):
    """Talks to ranks that pause while the cell runs."""

    def on_paused(self, rank: int, event: PausedEvent) -> None:
        """Note, from any thread, that a rank waits for a command."""

    def step(self, run: Any) -> float:
        """Ask the user if a rank waits, on the notebook's thread; return how long that took, in seconds."""


class RankProgress(Struct, frozen=True):
    """How far one rank is with the cell."""

    replied_at: float = 0.0
    idle: bool = False
    processing: bool = False
    """Whether the notebook is processing output of the rank right now."""
    processed_at: float = 0.0
    """When it last had."""
    gone_at: float = 0.0
    """When its process was seen to be gone; 0: it is not."""
    error: RankError | None = None
    end: CellEnd | None = None
    """What its reply says about the cell; None: there is none yet."""

    @property
    def is_gone(self) -> bool:
        """Whether the rank no longer replies: its process is gone, or it is stuck."""
        return bool(self.gone_at) or (self.error is not None and self.error.kind == "stuck")

    def is_done(self, now: float) -> bool:
        """Whether the rank has replied and sent its output, or has timed out sending it."""
        if self.idle or not self.replied_at:
            return bool(self.replied_at)
        if self.processing:
            return now - self.replied_at > _MAX_OUTPUT_TIMEOUT_S
        timeout_s = _DEAD_OUTPUT_TIMEOUT_S if self.gone_at else _OUTPUT_TIMEOUT_S
        silent_s = now - max(self.gone_at or self.replied_at, self.processed_at)
        return silent_s > timeout_s or now - self.replied_at > _MAX_OUTPUT_TIMEOUT_S


def was_aborted(name: str, message: str, *, aborting: bool) -> bool:
    """Whether a rank's exception says that the notebook aborted its cell, rather than that the cell failed.

    Args:
        name: Type name of the exception.
        message: Its message.
        aborting: Whether the notebook has asked the ranks to abort.
    """
    if name in _ABORTED:
        return True
    return aborting and (name in _ABORTED_ON_REQUEST or any(text in message for text in _ABORT_MESSAGES))


def describe_abort(at: AbortLocation | None) -> str:
    """Describe what a rank did when its cell was aborted; reads after its name."""
    line = f" at line {at.line}{at.within}" if at is not None and at.line else ""
    return f"waited in {at.call}{line}" if at is not None and at.call else f"was interrupted{line}"


class CellOptions(TypedDict, total=False):
    """All are optional."""

    ranks: str | Iterable[int] | None
    """Which ranks, such as ``"0,2-3"`` or ``[0, 2]``. Default: None, all."""
    quiet: bool
    """Show nothing; what ranks print is in the result's `text`."""
    timeout: float | None
    """Timeout in seconds. Default: None, no timeout."""
    check: bool
    """Raise if a rank fails. Default: True; otherwise the failures are in the result's `errors`."""
    cell: int | None
    """Number that names the code in tracebacks. Default: None, a running number."""
    view: LiveView | None
    """A live view to flush while the cell runs."""
    exclusive: bool
    """Whether no other cell is sent before this one is done. If so, communication with ranks that do not run it is
    refused at once. Default: False."""
    values: bool
    """Whether to fetch the values of the last expression. Default: True."""
    show_value: bool
    """Whether to show these values as well. Default: False."""
    measurement: Measurement
    """What ranks measure while the cell runs. Default: nothing."""
    debugger: CellDebugger | None
    """Asks the user for the commands of ranks that pause. Default: None, the ranks continue at once."""
    pauses: Pauses
    """Where the cell pauses, if there is a `debugger`. Default: nowhere, not even at `breakpoint()`."""
    undoable: bool
    """Whether `%distributed undo` can take this cell back, unless `config undo_memory` is 0. Default: False."""
    restores: bool | Trials
    """Whether the state before the cell is restored after it, however it ends (`--try`). Default: False. Cells that
    run one after the other from the same state share `Trials`."""
    is_debugger: bool
    """Whether this is a command of the debugger, which leaves the failure on the rank. Default: False."""
