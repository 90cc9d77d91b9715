"""How much memory this process can still take without another one being ended for it.

Read here and not by psutil: this package imports the standard library alone, and psutil looks at no cgroup.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["free_memory"]

_AVAILABLE = re.compile(r"^MemAvailable:\s*(\d+) kB$", re.MULTILINE)
_CACHE = re.compile(r"^inactive_file (\d+)$", re.MULTILINE)


def free_memory(cgroup: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that are free or can be freed at once, on the machine or in its cgroup (v2), whichever has less.

    Args:
        cgroup: Where the files of this process's cgroup are.
        meminfo: The kernel's table of the machine's memory.

    Returns:
        None when it is not known.
    """
    available = _AVAILABLE.search(_read(meminfo))
    free = [int(available[1]) << 10] if available else []
    limit, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if limit.isdigit() and used.isdigit():  # without a limit the first is "max"
        cache = _CACHE.search(_read(cgroup / "memory.stat"))
        free.append(max(0, int(limit) - int(used) + (int(cache[1]) if cache else 0)))
    return min(free, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
