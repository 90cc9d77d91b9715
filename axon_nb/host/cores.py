"""How many CPU cores this process may use: affinity and the container's quota, not what the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["usable_cores"]


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores by CPU affinity, lowered to the cgroup's quota (v2 `cpu.max`, v1 `cfs_quota_us`); at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quota = _quota(cgroup)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text()
        period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
        return None if int(limit) <= 0 else int(limit) / int(period)
    except (OSError, ValueError):
        return None
