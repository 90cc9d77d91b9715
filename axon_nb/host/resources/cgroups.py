"""What cgroups, the CPU affinity and the machine leave to this process: cores and free memory.

Limits of cgroups count at every level, from the process's own to the top.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
"""Where cgroups are mounted."""
OWN_CGROUP = Path("/proc/self/cgroup")
"""Lists the cgroups of this process, one line per hierarchy."""
_AVAILABLE = re.compile(r"^MemAvailable:\s*(\d+) kB$", re.MULTILINE)
_MACHINE = Path("/proc/meminfo")
_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
_CACHE = {
    1: re.compile(r"^total_inactive_file (\d+)$", re.MULTILINE),
    2: re.compile(r"^inactive_file (\d+)$", re.MULTILINE),
}
"""Files and fields by cgroup version."""
_UNLIMITED = 1 << 60
"""Without a limit, version 1 reports the largest number of whole pages."""


def cgroup_folders(controller: str, *, root: Path = CGROUPS, own: Path = OWN_CGROUP) -> list[tuple[Path, int]]:
    """Return the folders of this process's cgroup and its ancestors, lowest first, each with its version (1 or 2).

    In a container the listed path is often the host's, which is not mounted: such folders do not exist, and the topmost
    one is the container's own.

    Args:
        controller: Name, such as ``cpu`` or ``memory``.
        root: Where cgroups are mounted.
        own: A file like /proc/self/cgroup.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    found: list[tuple[Path, int]] = []
    for _, names, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if names == "":
            base, version = root, 2
        elif controller in names.split(","):
            mounts = [root / names, root / controller]  # "cpu,cpuacct", often with a link to it called "cpu"
            base, version = next((mount for mount in mounts if mount.is_dir()), root / controller), 1
        else:
            continue
        below = Path(path.lstrip("/"))
        if ".." in below.parts:  # the process was moved out of the container's namespace
            below = Path()
        found += [(base / part, version) for part in dict.fromkeys((below, *below.parents))]
    return found


def usable_cores(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Return the number of usable cores: the CPU affinity, limited by the lowest cgroup quota; at least 1.

    Args:
        root: Where cgroups are mounted: v2 with `cpu.max`, v1 with `cpu.cfs_quota_us`.
        own: A file like /proc/self/cgroup.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quotas = [_quota(folder, version) for folder, version in cgroup_folders("cpu", root=root, own=own)]
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas if quota is not None)]))


def _quota(folder: Path, version: int) -> float | None:
    """Return the number of CPUs that the processes of a cgroup may use; None: no limit."""
    try:
        if version == 2:
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max" is not a number
        return None


def free_memory(root: Path = CGROUPS, own: Path = OWN_CGROUP, meminfo: Path = _MACHINE) -> int | None:
    """Return the bytes that are free or can be freed at once, on the machine and in all cgroups; None: unknown.

    Args:
        root: Where cgroups are mounted.
        own: A file like /proc/self/cgroup.
        meminfo: A file like /proc/meminfo.
    """
    of_groups = [_of_cgroup(folder, version) for folder, version in cgroup_folders("memory", root=root, own=own)]
    return min((value for value in (_of_machine(meminfo), *of_groups) if value is not None), default=None)


def _of_machine(meminfo: Path) -> int | None:
    try:
        match = _AVAILABLE.search(meminfo.read_text())
    except OSError:
        return None
    return int(match.group(1)) << 10 if match else None


def _of_cgroup(folder: Path, version: int) -> int | None:
    try:
        limit, used = (int((folder / name).read_text()) for name in _FILES[version])
    except (OSError, ValueError):  # "max" is not a number
        return None
    return max(0, limit - used + _cache(folder, version)) if limit < _UNLIMITED else None


def _cache(folder: Path, version: int) -> int:
    """Return the bytes of cached files, which the kernel can drop at once."""
    try:
        match = _CACHE[version].search((folder / "memory.stat").read_text())
    except OSError:
        return 0
    return int(match.group(1)) if match else 0
