"""Internals of mock worlds: the scheduler, the hub that connects ranks, and torch's group API on top."""

from __future__ import annotations

from axon_nb.comm.mock.group import NAME, Hub, MockBackend, MockGroup
from axon_nb.comm.mock.scheduler import TurnScheduler, set_thread_isolation

__all__ = [
    "NAME",
    "Hub",
    "MockBackend",
    "MockGroup",
    "TurnScheduler",
    "set_thread_isolation",
]
