"""What the notebook asks of a rank's snapshots: list them, undo a cell, hold one and restore it."""

from __future__ import annotations

from axon_nb.engine.session import current
from axon_nb.engine.snapshot.history import CellSnapshot, History, TooLargeError
from axon_nb.engine.snapshot.memory import default_limit
from axon_nb.records.protocol.recovery import Undoable, UndoableCell


def list_undoable() -> Undoable:
    """List the cells that this rank can undo, and those that it cannot undo with the reason."""
    history = _history()
    return Undoable(history.since, tuple(_record(history, cell) for cell in history.cells))


def _history() -> History:
    history = current().snapshots
    assert isinstance(history, History)
    return history


def _record(history: History, cell: CellSnapshot) -> UndoableCell:
    before = history.state_before(cell)
    obstacles = dict(before.snapshot.state.obstacles) if before is not None and before.snapshot is not None else {}
    missing = before.missing if before is not None else ""
    if changed := history.changed_above_limit(cell):
        variables = " and ".join(f"`{name}`" for name in changed[:2]) + " and more" * (len(changed) > 2)
        raise_it = "`%distributed config undo_memory=SIZE` sets it for later cells"
        missing = f"has changed {variables}, which {obstacles[changed[0]]}; {raise_it}"
    return UndoableCell(cell.run, cell.cell, cell.ranks, cell.started, missing, obstacles)


def undo(run: str) -> list[str]:
    """Restore the state before the cell with this run; return a line for each object that refused its state."""
    current().protection.forget()  # a death before the next cell must not bring back what is undone
    return _history().undo(run)


def hold(key: str, limit: int) -> UndoableCell:
    """Hold a snapshot; the record says what in it cannot be restored, or why there is none.

    Args:
        key: A name for it.
        limit: Bytes that it may always take; more, if it is at most half of the memory that is free.
    """
    try:
        obstacles = _history().hold(key, max(limit, default_limit()))
    except TooLargeError as error:
        return UndoableCell(key, 0, (), 0.0, missing=str(error))
    return UndoableCell(key, 0, (), 0.0, obstacles=obstacles)


def restore_held(key: str) -> list[str]:
    """Restore a held snapshot, and forget it; return a line for each object that refused its state."""
    history = _history()
    refused = history.restore_held(key)
    history.release(key)
    return refused
