"""What a rank wrote last outside of Python's streams, to two files beside its log; the controller's last line."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["LastWords", "describe_controller", "last_line"]

_MAX_BYTES = 32768
_MAX_LINE = 300
_RECENT_S = 2.0
"""Text older than this at a rank's death has nothing to do with it."""
_WORDS, _CRASH = ".err", ".crash"
"""What C code wrote to descriptor 2, and Python's report of a crash."""


@dataclass
class LastWords:
    """The files of each rank, and how long they were when it began."""

    _begun: dict[int, tuple[Path, dict[str, int]]] = field(default_factory=dict)

    def begin(self, rank: int, log: Path) -> None:
        """A rank is about to begin; one that it replaces has written to the same files."""
        self._begun[rank] = (log, {suffix: _size(log.with_suffix(suffix)) for suffix in (_WORDS, _CRASH)})

    def of(self, rank: int) -> dict[str, str]:
        """`words` and `crash`: what the rank wrote in its last moments, at most 32 KiB each; empty when nothing."""
        if rank not in self._begun:
            return {}
        log, sizes = self._begun[rank]
        # Linux may take seconds to end a process that has crashed: it writes its memory to a core file.
        crash, crashed = _text(log.with_suffix(_CRASH), sizes[_CRASH])
        words, written = _text(log.with_suffix(_WORDS), sizes[_WORDS])
        is_recent = (crashed if crash else time.time()) - written <= _RECENT_S
        return {"words": words if is_recent else "", "crash": crash}


def last_line(log: Path) -> str:
    """The last line of a log that is not empty, at most 300 characters; empty when there is none."""
    lines = _text(log, 0)[0].split("\n")
    return next((line.strip()[:_MAX_LINE] for line in reversed(lines) if line.strip()), "")


def describe_controller(code: int, words: str) -> str:
    """One sentence about a controller that has ended with this exit status, or minus the number of a signal."""
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
    return f"The ipyparallel controller {how}" + (f": {words}" if words else ", and wrote nothing.")


def _text(path: Path, begun: int) -> tuple[str, float]:
    """The end of what was written since `begun` bytes were there, and when it was written last, in Unix time."""
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            begin = begun if begun <= info.st_size else 0  # the rank shortens what has become too long
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
