"""What a rank's memory holds, and who says so."""

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
"""What memory is for, in the order in which it is drawn; of whole parameters of FSDP, of buffers of collectives and of
what fragmentation may take, plans alone know."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one rank at one moment, in bytes."""

    rank: int
    """Rank in the default group."""
    time_ns: int
    """When: nanoseconds of `time.monotonic_ns`."""
    source: str
    """Who says so: ``storages`` (live tensors by role), ``allocator`` (CUDA), ``estimate`` (a formula) or ``plan`` (a
    simulation)."""
    by_role: Mapping[str, int] = field(default_factory=dict)
    """Bytes by role, one of `ROLES`; what is not known is left out."""
    peak: int | None = None
    """Highest total since the last reset; None when the source does not know it."""
    resident: int = 0
    """Resident memory of the process, drawn apart: it holds the interpreter and the libraries too."""
    capacity: int | None = None
    """What the device has; None when unknown. Of a CPU rank what `resident` could grow to: it and what is free."""
    resident_peak: int = 0
    """Highest resident memory since the process began; 0: not known."""
    occupied: int | None = None
    """What of `capacity` is taken, by other processes too; None when unknown."""

    @property
    def total(self) -> int:
        """Sum over all roles."""
        return sum(self.by_role.values())
