"""What the notebook asks of a rank's protection: which steps it holds, to return to one, and to keep a state."""

from __future__ import annotations

from axon_nb.engine.session import current
from axon_nb.records.protocol.recovery import ProtectedSteps, UndoableCell


def list_protected() -> ProtectedSteps:
    """List the states that outlive this rank."""
    protection = current().protection
    return ProtectedSteps(tuple(protection.steps()), protection.steps_now())


def restore(run: str, fence: tuple[int, int]) -> list[str]:
    """Return to one of them; return a line for each object that refused its part."""
    return current().protection.restore(run, fence)


def keep(key: str, limit: int) -> UndoableCell:
    """Save the state now; the record says what in it cannot be restored, or why it was not saved.

    Args:
        key: A name for it, in place of a cell's run.
        limit: Bytes that it may take; 0: half of the memory that is free.
    """
    return current().protection.keep(key, limit)


def forget(key: str) -> None:
    """Give up all slots, unless the state of a cell has taken the place of this one."""
    protection = current().protection
    if all(step.run == key for step in protection.steps()):
        protection.forget()
