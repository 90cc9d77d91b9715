"""What the notebook asks of a rank's snapshots: list them, undo a cell, hold one and restore it."""

from __future__ import annotations

from axon_nb.engine.session import current
from axon_nb.engine.snapshot.history import CellSnapshot, History, TooLargeError
from axon_nb.engine.snapshot.memory import default_limit
from axon_nb.records.protocol.recovery import Undoable, UndoableCell

__all__ = ["hold", "list_undoable", "restore_held", "undo"]


def list_undoable() -> Undoable:
    """List the cells that this rank can undo, and those that it cannot undo with the reason."""
    history = _history()
    return Undoable(history.since, tuple(map(_record, history.cells)))


def _history() -> History:
    history = current().snapshots
    assert isinstance(history, History)
    return history


def _record(cell: CellSnapshot) -> UndoableCell:
    obstacles = dict(cell.snapshot.state.obstacles) if cell.snapshot is not None else {}
    return UndoableCell(cell.run, cell.cell, cell.ranks, cell.started, cell.missing, obstacles)


def undo(run: str) -> list[str]:
    """Restore the state before the cell with this run; return a line for each object that refused its state."""
    current().protection.forget()  # a death before the next cell must not bring back what is undone
    return _history().undo(run)


def hold(key: str, limit: int) -> UndoableCell:
    """Hold a snapshot; the record says what in it cannot be restored, or why there is none.

    Args:
        key: A name for it.
        limit: Bytes that it may take; 0: half of the memory that is free.
    """
    try:
        obstacles = _history().hold(key, limit or default_limit())
    except TooLargeError as error:
        return UndoableCell(key, 0, (), 0.0, missing=str(error))
    return UndoableCell(key, 0, (), 0.0, obstacles=obstacles)


def restore_held(key: str) -> list[str]:
    """Restore a held snapshot, and forget it; return a line for each object that refused its state."""
    history = _history()
    refused = history.restore_held(key)
    history.release(key)
    return refused
