"""Why a wait in a group over shared memory ended without what it waited for."""

from __future__ import annotations

__all__ = ["GroupLeftError", "PeerLostError", "SharedMemoryTimeoutError"]


class GroupLeftError(RuntimeError):
    """This rank or a peer has left the group: it was aborted, interrupted, or gave up waiting."""


class PeerLostError(GroupLeftError):
    """A rank that is waited for is dead."""


class SharedMemoryTimeoutError(RuntimeError):
    """A wait reached its limit."""
