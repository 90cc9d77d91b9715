"""Detection of out-of-memory kills from Linux's counters, read before and after a death."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["OomCounter", "counter_file", "read_count"]

_MOUNTS = Path("/proc/self/mountinfo")
_GROUPS = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/vmstat")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OomCounter:
    """Tracks out-of-memory kills in this cgroup, or on the whole machine if the cgroup has no counter.

    Linux counts before it sends SIGKILL, so the counter has already changed when the death is seen.
    """

    def __init__(self, own: Path | None = None, machine: Path = _MACHINE) -> None:
        self._own = own or counter_file(_GROUPS, _MOUNTS)
        self._machine = machine
        self._before = self._counts()

    def _counts(self) -> tuple[int | None, int | None]:
        return (read_count(self._own) if self._own is not None else None), read_count(self._machine)

    def poll(self) -> bool | None:
        """Whether a process was killed for lack of memory since the last call; None if unknown."""
        before, now = self._before, self._counts()
        self._before = now
        for verdict, old, new in zip((True, None), before, now, strict=True):
            if old is not None and new is not None:
                # The machine-wide counter may have counted someone else's process: an increase proves nothing.
                return verdict if new > old else False
        return None


def read_count(file: Path) -> int | None:
    """Read `oom_kill` from a `memory.events`, `memory.oom_control` or `vmstat` file; None if it has none."""
    try:
        match = _COUNT.search(file.read_text())
    except OSError:
        return None
    return int(match.group(1)) if match else None


def counter_file(groups: Path, mounts: Path) -> Path | None:
    """Find the file with the counter of the cgroup in `groups` (a /proc/<pid>/cgroup file); None if there is none.

    Args:
        groups: A file such as /proc/self/cgroup.
        mounts: A file such as /proc/self/mountinfo: where, and with which root, the hierarchies are mounted.
    """
    try:
        entries = [line.split(":", 2) for line in groups.read_text().splitlines()]
        mounted = [_mount(line) for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in sorted(entries, key=lambda entry: entry[1]):  # version 2 first
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
