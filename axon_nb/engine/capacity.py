"""How much memory a rank could have: of its GPU, or of its host, where a cgroup may allow less than there is."""

from __future__ import annotations

import re
from pathlib import Path

import torch

__all__ = ["capacity", "free_on_host"]

_INFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)
_CACHE = re.compile(r"^inactive_file (\d+)$", re.MULTILINE)


def capacity(device: torch.device, resident: int) -> tuple[int | None, int | None]:
    """(what there is for this rank, what of it is taken), in bytes; None: not known.

    Args:
        device: What the rank computes on. Of a CUDA device: all its memory, and what all processes have of it.
        resident: Resident memory of the process. On a CPU: that and what is free on the host.
    """
    if device.type == "cuda":
        if not torch.cuda.is_initialized():  # asking would initialise it
            return None, None
        free, total = torch.cuda.mem_get_info(device)
        return total, total - free
    room = free_on_host()
    return (None, None) if room is None else (resident + room, resident)


def free_on_host(info: Path = _INFO, group: Path = _GROUP) -> int | None:
    """Bytes that processes of this host, or of this cgroup when it has less, can still get; None: not known.

    Args:
        info: The kernel's /proc/meminfo.
        group: Where the files of this process's cgroup (version 2) are.
    """
    found = _AVAILABLE.search(_read(info))
    free = [int(found[1]) * 1024] if found else []
    limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        cache = _CACHE.search(_read(group / "memory.stat"))
        free.append(max(0, int(limit) - int(used) + (int(cache[1]) if cache else 0)))
    return min(free, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
