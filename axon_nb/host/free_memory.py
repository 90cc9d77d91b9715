"""How much memory this process can still take without another one being ended for it."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["free_memory"]

_AVAILABLE = re.compile(r"^MemAvailable:\s*(\d+) kB$", re.MULTILINE)
_CACHE = re.compile(r"^inactive_file (\d+)$", re.MULTILINE)


def free_memory(cgroup: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that are free or can be freed at once, on the machine and in its cgroup (v2); None: nobody tells."""
    known = [value for value in (_of_machine(meminfo), _of_cgroup(cgroup)) if value is not None]
    return min(known, default=None)


def _of_machine(meminfo: Path) -> int | None:
    try:
        match = _AVAILABLE.search(meminfo.read_text())
    except OSError:
        return None
    return int(match.group(1)) << 10 if match else None


def _of_cgroup(cgroup: Path) -> int | None:
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        cache = _CACHE.search((cgroup / "memory.stat").read_text())
        return None if limit == "max" else max(0, int(limit) - used + (int(cache.group(1)) if cache else 0))
    except (OSError, ValueError):
        return None
