"""What one rank is doing at one moment."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Activity", "RankState"]


class Activity(enum.StrEnum):
    """What a rank's main thread does, as its sampler saw it."""

    IDLE = "idle"
    """No cell runs on the rank."""
    RUNNING = "running"
    """The cell's own code runs."""
    COLLECTIVE = "collective"
    """Inside a collective or point-to-point call."""
    WAITING = "waiting"
    """Inside the same communication call for longer than a quarter of a second."""
    DONE = "done"
    """The rank has finished the cell that other ranks still run."""
    FAILED = "failed"
    """The cell raised on this rank."""
    DEAD = "dead"
    """The process is gone."""


@dataclass(frozen=True, slots=True)
class RankState:
    """One sample of one rank; made on the rank, shown in the notebook."""

    rank: int
    """Rank in the default group."""
    activity: Activity
    """What the main thread does."""
    time_ns: int
    """When: nanoseconds of `time.monotonic_ns`, the same clock for all processes of a host."""
    cell: int | None = None
    """Number of the notebook cell that runs (its `In [n]`); None when idle."""
    line: int | None = None
    """Line of that cell, counted from 1 with the magic's line as the first."""
    call: str = ""
    """Name of the communication call the rank is in, such as ``all_reduce``; empty outside one."""
    since_ns: int = 0
    """Since when it is in this activity and call, on the same clock."""
    rss_bytes: int = 0
    """Resident memory of the process, in bytes."""
    device_bytes: int = 0
    """Memory allocated on the accelerator, in bytes (0 on CPU ranks)."""
