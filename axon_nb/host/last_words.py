"""Last output of a dead rank from outside Python's streams (two files beside its log), and of the controller."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["LastOutput", "describe_controller_exit", "last_line"]

_MAX_BYTES = 32768
_MAX_LINE = 300
_RECENT_S = 2.0
"""Output older than this when a rank dies is unrelated to the death."""
_STDERR, _CRASH = ".err", ".crash"
"""File suffixes: what C code wrote to file descriptor 2, and faulthandler's report of a crash."""


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
