"""The states of a running cell, and how events move it from one to the next: data in, data out, no clock.

`transition` takes what can happen to a cell (events) and returns what `CellRun` does about it (effects).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from axon_nb.cluster.cells.options import RankProgress, describe_abort, was_aborted
from axon_nb.cluster.failures import RankError
from axon_nb.records.protocol.cells import AbortLocation, CellEnd, CellOutcome
from axon_nb.records.telemetry import Activity

_GIVE_UP_S = 10.0
"""Ranks that do not reply for this long after an abort are reported as stuck, and the cell is done."""
_STOPPED_GIVE_UP_S = 1.0
"""Ranks that are stopped (SIGSTOP) are reported as stuck this long after an abort."""
_SECOND_INTERRUPT_AFTER_S = 1.0
"""An interrupt counts as the second one if this much time has passed since the first."""
_SECOND_INTERRUPT_GRACE_S = 0.5
"""Ranks that are still in C code this long after the second interrupt are replaced."""
_INTERRUPT_DELAY_S, _INTERRUPT_DELAY_TICKS = 0.06, 10
"""Jupyter interrupts a kernel before it restarts it: an interrupt takes effect after this time and number of ticks."""


class Output(Struct, frozen=True):
    """A rank printed or displayed something."""

    rank: int
    kind: str
    content: dict[str, Any]
    metadata: dict[str, Any]


class Processed(Struct, frozen=True):
    """The notebook has processed a rank's last `Output`: a megabyte of lines takes seconds on a busy machine."""

    at: float
    rank: int


class Idle(Struct, frozen=True):
    """A rank has sent all its output."""

    rank: int


class Reply(Struct, frozen=True):
    """A rank has finished the cell; a late one comes after the cell gave the rank up."""

    at: float
    rank: int
    outcome: CellOutcome
    aborting: bool
    """Whether ranks had been asked to stop."""
    idle: bool = False
    """Whether all its output is here."""


class Death(Struct, frozen=True):
    """A rank's process is gone; `reason` reads after its name."""

    at: float
    rank: int
    reason: str


class Interrupt(Struct, frozen=True):
    """The user interrupts the cell; a second one, a while later, also replaces ranks that are in C code."""

    at: float


class Timeout(Struct, frozen=True):
    """The cell has run for as long as it may."""


class Aborted(Struct, frozen=True):
    """Ranks were asked to stop."""


class Lost(Struct, frozen=True):
    """The whole cluster is gone; `reason` reads after its name."""

    reason: str


class Recovered(Struct, frozen=True):
    """The groups were rebuilt, or disabled."""


class Tick(Struct, frozen=True):
    """Time has passed; what can be seen from outside the cell."""

    at: float
    drained: bool = True
    """Whether all output received so far is shown."""
    acknowledged: bool = True
    """Whether every abort was acknowledged, or will not be."""
    aborted_at: float | None = None
    """When the first abort was sent; None: none was."""
    stuck: Mapping[int, RankError] = field(default_factory=dict)
    """What each unfinished rank is stuck in, if it is, once an abort was sent."""
    unresponsive: AbstractSet[int] = frozenset()
    """Ranks in C code, which have not noticed an abort."""
    stopped: AbstractSet[int] = frozenset()
    """Ranks that nothing reaches: their process, or the controller's, is stopped."""


Event = Output | Processed | Idle | Reply | Death | Interrupt | Timeout | Aborted | Lost | Recovered | Tick


class Wake(Struct, frozen=True):
    """The next tick is due now."""


class ShowOutput(Struct, frozen=True):
    """Show output: as the cell's, or as what came after it."""

    output: Output
    is_late: bool


class RankDone(Struct, frozen=True):
    """Wait for no more output of a rank."""

    rank: int


class RankEnded(Struct, frozen=True):
    """Show in the live view how the cell ended on a rank."""

    rank: int
    activity: Activity
    at: AbortLocation | None = None
    """Where its cell was aborted; None if it was not."""


class LateReply(Struct, frozen=True):
    """A rank that was reported as stuck is back."""

    rank: int


class ResendAbort(Struct, frozen=True):
    """Send the abort again at the next tick."""


class Abort(Struct, frozen=True):
    """Decide whether to abort the unfinished ranks, and abort them."""

    failed_at: float | None = None
    """When the first rank failed; None: none has."""
    died: bool = False
    """Whether a rank has died."""
    interrupted: bool = False
    """Whether the user interrupted the cell."""
    timed_out: bool = False


class Recover(Struct, frozen=True):
    """Show the rest of the output, then rebuild the groups."""


Effect = Wake | ShowOutput | RankDone | RankEnded | LateReply | ResendAbort | Abort | Recover


Result = tuple["Cell", tuple[Effect, ...]]


class State(Enum):
    """Where a cell is on its way."""

    SENT = "sent"
    """No rank has shown a sign of it."""
    RUNNING = "running"
    ABORTING = "aborting"
    """The ranks were asked to stop, and some have not replied."""
    DRAINING = "draining"
    """All ranks have replied; their last output, or the acknowledgement of an abort, is on its way."""
    RECOVERING = "recovering"
    """The groups are being rebuilt; the cell takes no more output."""
    DONE = "done"


class Cell(Struct, frozen=True):
    """All that is known of a running cell."""

    ranks: Mapping[int, RankProgress]
    state: State = State.SENT
    can_recover: bool = True
    must_recover: bool = False
    """Whether the groups must be rebuilt at the end, however the cell ends."""
    aborting: bool = False
    failed: tuple[int, ...] = ()
    """The ranks that failed, in this order."""
    failed_at: float | None = None
    """When the first rank failed."""
    interrupted_at: float | None = None
    second_interrupt_at: float | None = None
    ticks_since_interrupt: int = 0
    timed_out: bool = False
    gave_up: bool = False
    to_replace: tuple[int, ...] = ()
    """Ranks in C code that the user, by a second interrupt, wants to be replaced."""
    lost: str = ""
    """Why the cluster is gone; empty while it is there."""

    @property
    def unfinished(self) -> list[int]:
        """The ranks that have not finished the cell."""
        return [rank for rank, progress in self.ranks.items() if not progress.replied_at]

    @property
    def errors(self) -> dict[int, RankError]:
        """Failures by rank."""
        return {rank: progress.error for rank, progress in self.ranks.items() if progress.error is not None}

    @property
    def ends(self) -> dict[int, CellEnd]:
        """By rank, what its reply says about the cell, such as what was measured."""
        return {rank: progress.end for rank, progress in self.ranks.items() if progress.end is not None}

    @property
    def seconds(self) -> dict[int, float]:
        """How long the cell ran on each rank, in seconds."""
        ends = self.ends
        return {rank: ends[rank].seconds if rank in ends else 0.0 for rank in self.ranks}

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more output."""
        return self.state in {State.RECOVERING, State.DONE}


def transition(cell: Cell, event: Event) -> Result:
    """Return the cell after `event`, and the effects that the caller performs, in this order."""
    match event:
        case Output():
            return _settle(_update(cell, event.rank, processing=True)), (ShowOutput(event, cell.is_closed),)
        case Processed():
            return _update(cell, event.rank, processing=False, processed_at=event.at), ()
        case Idle():
            cell = _settle(_update(cell, event.rank, idle=True))
            wake = (Wake(),) if _is_complete(cell) else ()
            return cell, (RankDone(event.rank), *wake)
        case Reply():
            return _reply(cell, event)
        case Death():
            return _die(cell, event)
        case Interrupt():
            return _interrupt(cell, event.at)
        case Timeout():
            is_running = cell.state in {State.SENT, State.RUNNING}
            return replace(cell, timed_out=cell.timed_out or is_running), ()
        case Aborted():
            return (cell if cell.is_closed else _settle(replace(cell, aborting=True))), ()
        case Lost():
            return replace(cell, state=State.DONE, lost=event.reason), (Wake(),)
        case Recovered():
            return replace(cell, state=State.DONE) if cell.state is State.RECOVERING else cell, ()
        case Tick():
            return (cell, ()) if cell.is_closed else _tick(cell, event)


def _settle(cell: Cell) -> Cell:
    """Return the cell in the state that its ranks are in."""
    if cell.is_closed:
        return cell
    state = State.ABORTING if cell.aborting else State.RUNNING
    if all(progress.replied_at for progress in cell.ranks.values()):
        state = State.DRAINING
    return cell if state is cell.state else replace(cell, state=state)


def _is_complete(cell: Cell) -> bool:
    """Whether all ranks have replied and sent their output, so that the next tick ends the cell."""
    return all(progress.replied_at and progress.idle for progress in cell.ranks.values())


def _update(cell: Cell, rank: int, **changes: Any) -> Cell:
    return replace(cell, ranks={**cell.ranks, rank: replace(cell.ranks[rank], **changes)})


def _fail(cell: Cell, error: RankError, at: float) -> Cell:
    failed = cell.failed if error.rank in cell.failed else (*cell.failed, error.rank)
    failed_at = at if cell.failed_at is None else cell.failed_at
    return replace(_update(cell, error.rank, error=error), failed=failed, failed_at=failed_at)


def _reply(cell: Cell, event: Reply) -> Result:
    rank, outcome, end = event.rank, event.outcome, event.outcome.end
    idle = event.idle or cell.ranks[rank].idle
    cell = _update(cell, rank, replied_at=event.at, end=end, idle=idle)
    if outcome.status != "ok":
        if was_aborted(outcome.ename, outcome.evalue, aborting=event.aborting):
            error = RankError(rank, "aborted", outcome.ename, describe_abort(end.aborted_at))
        else:
            error = RankError(rank, "raised", outcome.ename, outcome.evalue, outcome.traceback)
        cell = _fail(cell, error, event.at)
    cell = replace(cell, must_recover=cell.must_recover or bool(end.left))
    error_now = cell.ranks[rank].error
    late = (LateReply(rank),) if cell.gave_up else ()
    if error_now is None:
        ended = RankEnded(rank, Activity.DONE)
    elif error_now.kind == "aborted":
        ended = RankEnded(rank, Activity.STOPPED, end.aborted_at or AbortLocation(None, ""))
    else:
        ended = RankEnded(rank, Activity.FAILED)
    done = (RankDone(rank),) if event.idle else ()
    # A tick costs the notebook's thread as much as a reply: none is due while others still run the cell.
    wake = (Wake(),) if error_now is not None or not cell.unfinished else ()
    return _settle(cell), (*done, *wake, *late, ended)


def _die(cell: Cell, event: Death) -> Result:
    progress = cell.ranks.get(event.rank)
    if progress is None:
        return cell, ()
    cell = _update(cell, event.rank, gone_at=progress.gone_at or event.at)
    if progress.replied_at:
        return cell, ()
    cell = _fail(cell, RankError(event.rank, "died", "", event.reason), event.at)
    cell = _update(cell, event.rank, idle=True, replied_at=event.at)
    ended = RankEnded(event.rank, Activity.DEAD)
    return _settle(cell), (RankDone(event.rank), Wake(), ended)


def _interrupt(cell: Cell, at: float) -> Result:
    if cell.interrupted_at is None:
        cell = replace(cell, interrupted_at=at)
    elif cell.second_interrupt_at is None and at - cell.interrupted_at >= _SECOND_INTERRUPT_AFTER_S:
        cell = replace(cell, second_interrupt_at=at)
    return cell, () if cell.is_closed else (ResendAbort(), Wake())


def _tick(cell: Cell, event: Tick) -> Result:
    cell = _give_up(cell, event)
    if cell.gave_up or (event.drained and all(progress.is_done(event.at) for progress in cell.ranks.values())):
        return _end(cell) if event.acknowledged else (cell, ())
    first = cell.interrupted_at
    if first is not None:
        cell = replace(cell, ticks_since_interrupt=cell.ticks_since_interrupt + 1)
    delayed = first is not None and event.at - first >= _INTERRUPT_DELAY_S
    interrupted = delayed and cell.ticks_since_interrupt >= _INTERRUPT_DELAY_TICKS
    died = any(error.kind == "died" for error in cell.errors.values())
    return cell, (Abort(cell.failed_at, died, interrupted, cell.timed_out),)


def _give_up(cell: Cell, event: Tick) -> Cell:
    """Report the unfinished ranks as stuck if they have had their time, or the user wants them replaced."""
    unfinished, second_at = cell.unfinished, cell.second_interrupt_at
    if event.aborted_at is None or cell.gave_up:
        return cell
    impatient = second_at is not None and event.at - second_at > _SECOND_INTERRUPT_GRACE_S
    if impatient and cell.can_recover and unfinished and event.unresponsive >= set(unfinished):
        cell = replace(cell, to_replace=tuple(unfinished))
    # If all have replied, their output is still on its way.
    stopped = bool(unfinished) and event.stopped >= set(unfinished)
    timeout_s = _STOPPED_GIVE_UP_S if stopped else _GIVE_UP_S
    if not cell.to_replace and event.at - event.aborted_at <= timeout_s:
        return cell
    for rank in unfinished:
        cell = _fail(cell, event.stuck[rank], event.at)
    return replace(cell, gave_up=True)


def _end(cell: Cell) -> Result:
    communicated = any(progress.end is not None and progress.end.calls for progress in cell.ranks.values())
    needed = cell.must_recover or cell.aborting or (bool(cell.failed) and communicated)
    if needed and cell.can_recover:
        return replace(cell, state=State.RECOVERING), (Recover(), Wake())
    return replace(cell, state=State.DONE), ()
