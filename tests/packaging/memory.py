"""A limit on the memory of processes together: a cgroup where one can be made, else a watch on what they use."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
WATCH_S = 0.2
"""Seconds between two looks at the processes where there is no cgroup."""


@dataclass
class MemoryLimit:
    """What runs under the limit, and what it used."""

    size: int
    """Bytes that all processes together may use."""
    kind: str
    """`cgroup v2`, `cgroup v1` or `watch`."""
    prefix: list[str] = field(default_factory=list)
    """A command that runs the rest of its arguments under the limit."""
    peak: int = 0
    """The most bytes used at one time, when the limit has ended; in a cgroup with the files that the kernel caches."""
    kills: int = 0
    """How many processes the kernel ended because the limit was reached."""


@contextlib.contextmanager
def memory_limit(size: int, processes: Callable[[], list[psutil.Process]]) -> Iterator[MemoryLimit]:
    """Limit the memory of what is run with `prefix`.

    Args:
        size: bytes.
        processes: those that count where no cgroup can be made.
    """
    for kind, folder, setting in (
        ("cgroup v2", CGROUPS, "memory.max"),
        ("cgroup v1", CGROUPS / "memory", "memory.limit_in_bytes"),
    ):
        group = folder / f"axon_nb-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if not (group / setting).exists():  # a hierarchy without this controller, or no hierarchy
            group.rmdir()
            continue
        (group / setting).write_text(str(size))
        limit = MemoryLimit(size, kind, ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")])
        try:
            yield limit
        finally:
            _read(limit, group)
            group.rmdir()  # refused while a process is left in it
        return
    limit, over = MemoryLimit(size, "watch"), threading.Event()
    watcher = threading.Thread(target=_watch, args=(limit, processes, over), daemon=True)
    watcher.start()
    try:
        yield limit
    finally:
        over.set()
        watcher.join()


def _read(limit: MemoryLimit, group: Path) -> None:
    """Fill in what the kernel counted."""
    for name in ("memory.peak", "memory.max_usage_in_bytes"):
        if (group / name).exists():
            limit.peak = int((group / name).read_text())
    for name in ("memory.events", "memory.oom_control"):
        if (group / name).exists():
            counts = dict(line.split() for line in (group / name).read_text().splitlines())
            limit.kills = int(counts.get("oom_kill", 0))


def _watch(limit: MemoryLimit, processes: Callable[[], list[psutil.Process]], over: threading.Event) -> None:
    """Add up the proportional set sizes, in which memory that processes share counts once."""
    while not over.wait(WATCH_S):
        used = 0
        for process in processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                used += process.memory_full_info().pss
        limit.peak = max(limit.peak, used)
