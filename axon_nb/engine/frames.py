"""Reads frames of the main thread and of others from another thread without crashing the process.

CPython creates a frame's object on demand. Before 3.12, that allocation may trigger a garbage collection, which runs
Python and so may let the main thread go on. The requested frame may be gone when its object is ready, and the next
access crashes the process (SIGSEGV, seen with 3.11.7 within a second; https://github.com/python/cpython/issues/111363).
Or the collection waits forever for a lock that `_current_frames` itself holds
(https://github.com/python/cpython/issues/106883). So garbage collection is paused meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType

_COLLECTS_ON_ALLOCATION = sys.version_info < (3, 12)
"""Later versions collect only between two instructions."""
_pause_lock = threading.RLock()
# A process forked during a pause would never collect again.
os.register_at_fork(before=_pause_lock.acquire, after_in_parent=_pause_lock.release, after_in_child=_pause_lock.release)


@contextlib.contextmanager
def gc_paused(*, on_main: bool = False) -> Iterator[None]:
    """Pause garbage collection for a moment; a no-op since Python 3.12, and on the main thread unless `on_main`."""
    if not _COLLECTS_ON_ALLOCATION or (not on_main and threading.current_thread() is threading.main_thread()):
        yield
        return
    with _pause_lock:  # otherwise the first thread to leave would re-enable it for the second
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


def main_frame() -> FrameType | None:
    """The innermost frame of the main thread; its `f_back` chain can be followed safely at any later time."""
    with gc_paused():
        innermost = frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:  # a frame keeps its object for as long as it runs
            frame = frame.f_back
    return innermost


def code_by_thread() -> dict[int, list[CodeType]]:
    """The code that each thread runs, by thread ident, innermost first."""
    codes: dict[int, list[CodeType]] = {}
    with gc_paused():
        for ident, innermost in sys._current_frames().items():
            frame: FrameType | None = innermost
            codes[ident] = []
            while frame is not None:
                codes[ident].append(frame.f_code)
                frame = frame.f_back
    return codes
