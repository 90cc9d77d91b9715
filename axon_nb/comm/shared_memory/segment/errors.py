"""Reasons why a wait in a group over shared memory was aborted."""

from __future__ import annotations


class GroupLeftError(RuntimeError):
    """This rank or a peer left the group: it was aborted, was interrupted, or timed out."""


class PeerLostError(GroupLeftError):
    """A rank that this one waits for is dead."""


class SharedMemoryTimeoutError(RuntimeError):
    """A wait timed out."""
