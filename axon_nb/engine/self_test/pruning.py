"""Removes the verdicts of builds that are no longer used.

A verdict's access time is the time of its last use. It is set here, because many file systems do not maintain it. The
modification time remains that of the test.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from axon_nb.engine.self_test.locking import hold_lock

__all__ = ["mark_used", "prune"]

_UNUSED_S = 30 * 86400.0
_MARK_INTERVAL_S = 86400.0
"""A use is noted at most once in this time."""


def mark_used(verdict: Path) -> None:
    """Note that a verdict was used now."""
    with contextlib.suppress(OSError):
        stat = verdict.stat()
        if time.time() - stat.st_atime > _MARK_INTERVAL_S:
            os.utime(verdict, ns=(time.time_ns(), stat.st_mtime_ns))


def prune(folder: Path, *, keep: str) -> None:
    """Remove verdicts that were not used for 30 days, with their locks; a build under test keeps both.

    Args:
        folder: The folder of the verdicts.
        keep: Name of the build to keep, without suffix.
    """
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            if path.name.startswith(".") and _is_unused(path):  # partly written: its writer was killed
                path.unlink(missing_ok=True)
        names = {path.stem for path in folder.iterdir() if path.suffix in (".json", ".lock")} - {keep}
        for name in names:
            _remove(folder / f"{name}.json", folder / f"{name}.lock")


def _remove(verdict: Path, lock: Path) -> None:
    if not (_is_unused(verdict) and _is_unused(lock)):
        return
    with contextlib.suppress(OSError), hold_lock(lock, timeout_s=0.0) as acquired:
        if acquired and _is_unused(verdict):
            verdict.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)


def _is_unused(path: Path) -> bool:
    """Whether a file was not used for 30 days; a missing file counts as unused."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return True
    return time.time() - max(stat.st_atime, stat.st_mtime) > _UNUSED_S
