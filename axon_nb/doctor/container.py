"""The limits of this process's cgroup."""

from __future__ import annotations

from pathlib import Path

from axon_nb.host.resources.cgroups import CGROUPS, OWN_CGROUP, cgroup_folders

_LIMIT = {
    ("memory", 1): "memory.limit_in_bytes",
    ("memory", 2): "memory.max",
    ("pids", 1): "pids.max",
    ("pids", 2): "pids.max",
}
_USAGE = {
    ("memory", 1): "memory.usage_in_bytes",
    ("memory", 2): "memory.current",
    ("pids", 1): "pids.current",
    ("pids", 2): "pids.current",
}
"""Files by controller and version of cgroups."""
_V1_UNLIMITED = 1 << 60
"""Without a limit, version 1 reports the largest number of whole pages."""


def cgroup_limit(controller: str, *, root: Path = CGROUPS, own: Path = OWN_CGROUP) -> tuple[int, int] | None:
    """Limit and usage of that cgroup, this process's own or one above it, which has the least left; None: no limit.

    Args:
        controller: ``memory`` (bytes) or ``pids`` (tasks).
        root: Where cgroups are mounted.
        own: Which of them this process is in.
    """
    limits = []
    for folder, version in cgroup_folders(controller, root=root, own=own):
        limit, used = (_number(folder / file[controller, version]) for file in (_LIMIT, _USAGE))
        if limit is not None and limit < _V1_UNLIMITED:
            limits.append((limit, used or 0))
    return min(limits, key=lambda pair: pair[0] - pair[1], default=None)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max" is not a number
        return None
