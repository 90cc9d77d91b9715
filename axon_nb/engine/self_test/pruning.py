"""Removing the verdicts of builds that nobody uses any more.

The time of a verdict's last use is its access time, which is set here: many file systems do not keep it by themselves.
Its modification time stays that of the test.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from axon_nb.engine.self_test.locking import hold_lock

__all__ = ["mark_used", "prune"]

_UNUSED_S = 30 * 86400.0
_MARKED_S = 86400.0
"""A use is noted at most once a day."""


def mark_used(verdict: Path) -> None:
    """Note that a verdict was used now."""
    with contextlib.suppress(OSError):
        facts = verdict.stat()
        if time.time() - facts.st_atime > _MARKED_S:
            os.utime(verdict, ns=(time.time_ns(), facts.st_mtime_ns))


def prune(folder: Path, *, but: str) -> None:
    """Remove verdicts that were not used for 30 days, with their locks; a build under test keeps both.

    Args:
        folder: Where verdicts are kept.
        but: Name of the build that stays, without suffix.
    """
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            if path.name.startswith(".") and _is_unused(path):  # half a verdict, whose writer was killed
                path.unlink(missing_ok=True)
        names = {path.stem for path in folder.iterdir() if path.suffix in (".json", ".lock")} - {but}
        for name in names:
            _remove(folder / f"{name}.json", folder / f"{name}.lock")


def _remove(verdict: Path, lock: Path) -> None:
    if not (_is_unused(verdict) and _is_unused(lock)):
        return
    with contextlib.suppress(OSError), hold_lock(lock, wait_s=0.0) as alone:
        if alone and _is_unused(verdict):
            verdict.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)


def _is_unused(path: Path) -> bool:
    """Whether nobody has used it for 30 days; a file that is not there counts as unused."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return True
    return time.time() - max(facts.st_atime, facts.st_mtime) > _UNUSED_S
