"""Snapshot of what one rank is doing."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Activity", "RankState"]


class Activity(enum.StrEnum):
    """What a rank's main thread is doing, according to its sampler."""

    IDLE = "idle"
    """No cell is running on the rank."""
    RUNNING = "running"
    """The cell's own code is running."""
    COLLECTIVE = "collective"
    """Inside a collective or point-to-point call."""
    WAITING = "waiting"
    """In the same communication call for more than a quarter of a second."""
    DONE = "done"
    """The rank has finished the cell; other ranks are still running it."""
    FAILED = "failed"
    """The cell raised an exception on this rank."""
    DEAD = "dead"
    """The process has exited."""


@dataclass(frozen=True, slots=True)
class RankState:
    """One sample of one rank, taken on the rank and shown in the notebook."""

    rank: int
    """Rank in the default group."""
    activity: Activity
    """What the main thread is doing."""
    time_ns: int
    """Time of the sample in nanoseconds of `time.monotonic_ns`, which all processes of a host share."""
    cell: int | None = None
    """Number of the running notebook cell (its `In [n]`); None when idle."""
    line: int | None = None
    """Line of that cell; the magic's line is line 1."""
    call: str = ""
    """Name of the communication call the rank is in, such as ``all_reduce``; empty outside one."""
    since_ns: int = 0
    """Start of this activity and call, on the same clock."""
    rss_bytes: int = 0
    """Resident memory of the process, in bytes."""
    device_bytes: int = 0
    """Memory allocated on the accelerator, in bytes; 0 on CPU ranks."""
