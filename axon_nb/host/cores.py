"""How many CPU cores this process may use: affinity and the container's quota, not what the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path

from axon_nb.host.cgroup import CGROUPS, OWN_CGROUP, folders

__all__ = ["usable_cores"]


def usable_cores(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Cores by CPU affinity, lowered to the least quota of this process's cgroup and those above it; at least 1.

    Args:
        root: Where cgroups are mounted: v2 with `cpu.max`, v1 with `cpu.cfs_quota_us`.
        own: A file like /proc/self/cgroup.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quotas = [_quota(folder, version) for folder, version in folders("cpu", root=root, own=own)]
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas if quota is not None)]))


def _quota(folder: Path, version: int) -> float | None:
    """CPUs that the processes of one cgroup may use; None: any number."""
    try:
        if version == 2:
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no number
        return None
