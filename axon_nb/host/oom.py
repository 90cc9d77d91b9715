"""Whether Linux ended a process for want of memory: its counters, read before and after a death."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["OomCounter", "counter_file", "read_count"]

_MOUNTS = Path("/proc/self/mountinfo")
_GROUPS = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/vmstat")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OomCounter:
    """Counts this cgroup's processes that were killed for want of memory, or the machine's where it has no counter.

    Linux counts before it sends SIGKILL, so the count has moved when the death is seen.
    """

    def __init__(self, own: Path | None = None, machine: Path = _MACHINE) -> None:
        self._own = own or counter_file(_GROUPS, _MOUNTS)
        self._machine = machine
        self._before = self._counts()

    def _counts(self) -> tuple[int | None, int | None]:
        return (read_count(self._own) if self._own is not None else None), read_count(self._machine)

    def look(self) -> bool | None:
        """Whether a process was killed for want of memory since the last look; None: nobody knows."""
        before, now = self._before, self._counts()
        self._before = now
        for moved_means, old, new in zip((True, None), before, now, strict=True):
            if old is not None and new is not None:
                # The machine's count may be of another's process: moved, it proves nothing.
                return moved_means if new > old else False
        return None


def read_count(file: Path) -> int | None:
    """`oom_kill` of a `memory.events`, `memory.oom_control` or `vmstat`; None where there is none."""
    try:
        match = _COUNT.search(file.read_text())
    except OSError:
        return None
    return int(match.group(1)) if match else None


def counter_file(groups: Path, mounts: Path) -> Path | None:
    """The file that counts for the cgroup named in `groups`, a /proc/<pid>/cgroup; None where there is none.

    Args:
        groups: Such as /proc/self/cgroup.
        mounts: Such as /proc/self/mountinfo: where the hierarchies are mounted, and which part of them.
    """
    try:
        entries = [line.split(":", 2) for line in groups.read_text().splitlines()]
        mounted = [_mount(line) for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in sorted(entries, key=lambda entry: entry[1]):  # the one of version 2 comes first
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        kind, name = ("cgroup", "memory.oom_control") if controllers else ("cgroup2", "memory.events")
        for found, root, point, options in mounted:
            if found != kind or (controllers and "memory" not in options):
                continue
            inside = path if root == "/" else path.removeprefix(root)
            for folder in (Path(point + inside), Path(point)):
                if read_count(folder / name) is not None:
                    return folder / name
    return None


def _mount(line: str) -> tuple[str, str, str, list[str]]:
    """(type, root within the hierarchy, mount point, superblock options) of one line of mountinfo."""
    before, _, after = line.partition(" - ")
    fields, rest = before.split(), after.split()
    return rest[0], fields[3], fields[4], rest[-1].split(",")
