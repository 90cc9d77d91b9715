"""Why a process died: its last output, from files and the controller's log, and Linux's out-of-memory counters."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

_MAX_BYTES = 32768
_MAX_LINE = 300
_RECENT_S = 2.0
"""Output older than this when a rank dies is unrelated to the death."""
_STDERR, _CRASH = ".err", ".crash"
"""File suffixes: what C code wrote to file descriptor 2, and faulthandler's report of a crash."""
_MOUNTS = Path("/proc/self/mountinfo")
_GROUPS = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/vmstat")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass
class LastOutput:
    """Reads what each rank wrote since it started, by the sizes that its files had then."""

    _start_sizes: dict[int, tuple[Path, dict[str, int]]] = field(default_factory=dict)

    def rank_starting(self, rank: int, log: Path) -> None:
        """Note the file sizes before a rank starts: the rank that it replaces wrote to the same files."""
        self._start_sizes[rank] = (log, {suffix: _size(log.with_suffix(suffix)) for suffix in (_STDERR, _CRASH)})

    def of(self, rank: int) -> dict[str, str]:
        """`last_output` and `crash`: what the rank wrote just before it died, at most 32 KiB each; may be empty."""
        if rank not in self._start_sizes:
            return {}
        log, sizes = self._start_sizes[rank]
        # Linux may take seconds to end a crashed process while it writes a core file.
        crash, crashed = _text(log.with_suffix(_CRASH), sizes[_CRASH])
        output, written = _text(log.with_suffix(_STDERR), sizes[_STDERR])
        is_recent = (crashed if crash else time.time()) - written <= _RECENT_S
        return {"last_output": output if is_recent else "", "crash": crash}


def last_line(log: Path) -> str:
    """The last non-empty line of a log, at most 300 characters; empty if there is none."""
    lines = _text(log, 0)[0].split("\n")
    return next((line.strip()[:_MAX_LINE] for line in reversed(lines) if line.strip()), "")


def describe_controller_exit(code: int, last_output: str) -> str:
    """Describe the controller's exit in one sentence; `code` is its exit status, or minus a signal's number."""
    how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    return f"The ipyparallel controller {how}" + (f": {last_output}" if last_output else " without any output.")


def _text(path: Path, start: int) -> tuple[str, float]:
    """The tail of what was written after the first `start` bytes, and the Unix time of the last write."""
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            begin = start if start <= info.st_size else 0  # the rank truncates files that grow too long
            if info.st_size <= begin:
                return "", 0.0
            file.seek(max(begin, info.st_size - _MAX_BYTES))
            return file.read(_MAX_BYTES).decode(errors="replace"), info.st_mtime
    except OSError:
        return "", 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


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
