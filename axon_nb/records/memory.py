"""Memory use of a rank by role, and its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ROLES", "MemoryUse"]

ROLES = (
    "parameters",
    "gradients",
    "optimizer",
    "buffers",
    "activations",
    "unsharded",
    "communication",
    "fragmentation",
    "other",
)
"""Uses of memory, in drawing order. Only plans know `unsharded` (full FSDP parameters), `communication` (buffers of
collectives) and `fragmentation`."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one rank at one moment, in bytes."""

    rank: int
    """Rank in the default group."""
    time_ns: int
    """Time of the sample, in nanoseconds of `time.monotonic_ns`."""
    source: str
    """``storages`` (live tensors by role), ``allocator`` (CUDA), ``estimate`` (formula) or ``plan`` (simulation)."""
    by_role: Mapping[str, int] = field(default_factory=dict)
    """Bytes by role (see `ROLES`); unknown roles are omitted."""
    peak: int | None = None
    """Highest total since the last reset; None if unknown."""
    resident: int = 0
    """Resident memory of the process, drawn separately: includes the interpreter and libraries."""
    capacity: int | None = None
    """Memory of the device; for a CPU rank `resident` plus free memory. None if unknown."""
    resident_peak: int = 0
    """Peak resident memory of the process; 0 if unknown."""
    occupied: int | None = None
    """Used part of `capacity`, including other processes; None if unknown."""

    @property
    def total(self) -> int:
        """Sum over all roles."""
        return sum(self.by_role.values())
