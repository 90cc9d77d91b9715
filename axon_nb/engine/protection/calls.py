"""What the notebook asks of a rank's protection: which steps it holds, and to return to one."""

from __future__ import annotations

from axon_nb.engine.session import current
from axon_nb.records.protocol.recovery import ProtectedSteps

__all__ = ["list_protected", "restore"]


def list_protected() -> ProtectedSteps:
    """List the states that outlive this rank."""
    protection = current().protection
    return ProtectedSteps(tuple(protection.steps()), protection.steps_now())


def restore(run: str, fence: tuple[int, int]) -> list[str]:
    """Return to one of them; return a line for each object that refused its part."""
    return current().protection.restore(run, fence)
