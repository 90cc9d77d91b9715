"""How much memory this process can still take without another one being ended for it."""

from __future__ import annotations

import re
from pathlib import Path

from axon_nb.host.cgroup import CGROUPS, OWN_CGROUP, folders

__all__ = ["free_memory"]

_AVAILABLE = re.compile(r"^MemAvailable:\s*(\d+) kB$", re.MULTILINE)
_MACHINE = Path("/proc/meminfo")
_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
_CACHE = {
    1: re.compile(r"^total_inactive_file (\d+)$", re.MULTILINE),
    2: re.compile(r"^inactive_file (\d+)$", re.MULTILINE),
}
"""Files and fields by version of cgroups."""
_UNLIMITED = 1 << 60
"""Without a limit version 1 tells the largest number of whole pages."""


def free_memory(root: Path = CGROUPS, own: Path = OWN_CGROUP, meminfo: Path = _MACHINE) -> int | None:
    """Bytes that are free or can be freed at once, on the machine, in its cgroup and those above; None: nobody tells.

    Args:
        root: Where cgroups are mounted.
        own: A file like /proc/self/cgroup.
        meminfo: A file like /proc/meminfo.
    """
    of_groups = [_of_cgroup(folder, version) for folder, version in folders("memory", root=root, own=own)]
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
    except (OSError, ValueError):  # "max" is no number
        return None
    return max(0, limit - used + _cache(folder, version)) if limit < _UNLIMITED else None


def _cache(folder: Path, version: int) -> int:
    """Bytes of files that the kernel keeps and can drop at once."""
    try:
        match = _CACHE[version].search((folder / "memory.stat").read_text())
    except OSError:
        return 0
    return int(match.group(1)) if match else 0
