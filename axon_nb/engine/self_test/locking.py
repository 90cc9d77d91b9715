"""A lock file that others may remove: the holder of the lock is the one that locks the file now at the path."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["hold_lock"]

_POLL_S = 0.02


@contextlib.contextmanager
def hold_lock(path: Path, *, timeout_s: float) -> Iterator[bool]:
    """Hold a lock; yield whether it was acquired.

    Args:
        path: The lock file; created if missing.
        timeout_s: Seconds to wait for it.

    Raises:
        OSError: the file cannot be created.
    """
    end = time.monotonic() + timeout_s
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            acquired = _lock(handle, end)
            if acquired and not _is_at(path, handle):
                continue  # removed while this process waited for it: others lock the file that is there now
            yield acquired
            return
        finally:
            os.close(handle)


def _lock(handle: int, end: float) -> bool:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
        time.sleep(_POLL_S)


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False
