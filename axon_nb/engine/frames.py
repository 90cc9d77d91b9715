"""Frames of the main thread and of others, as one thread of the rank sees them, without taking the process down.

CPython makes the object of a frame when somebody asks for it, in memory that before 3.12 may set off a garbage
collection. What is collected runs Python, and so may let the main thread go on; the frame that was asked for is gone
when its object is ready, and the next access ends the process (SIGSEGV, seen with 3.11.7 within a second;
https://github.com/python/cpython/issues/111363). Or the collection waits for ever for a lock that `_current_frames`
itself holds (https://github.com/python/cpython/issues/106883). So nothing is collected meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType

__all__ = ["code_by_thread", "gc_paused", "main_frame"]

_COLLECTS_ANYWHERE = sys.version_info < (3, 12)
"""Later versions collect between two instructions only."""
_one_at_a_time = threading.RLock()
# A process that is forked meanwhile would never collect again.
os.register_at_fork(
    before=_one_at_a_time.acquire, after_in_parent=_one_at_a_time.release, after_in_child=_one_at_a_time.release
)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage collection in here; for a few microseconds, on any thread but the main one, which needs it not."""
    if not _COLLECTS_ANYWHERE or threading.current_thread() is threading.main_thread():
        yield
        return
    with _one_at_a_time:  # else the first to leave would turn it on for the second
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


def main_frame() -> FrameType | None:
    """The innermost frame of the main thread, whose `f_back` may be followed to the end at any later time."""
    with gc_paused():
        innermost = frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:  # a frame that has its object keeps it for as long as it runs
            frame = frame.f_back
    return innermost


def code_by_thread() -> dict[int, list[CodeType]]:
    """What each thread runs, by its ident, innermost first."""
    found: dict[int, list[CodeType]] = {}
    with gc_paused():
        for ident, innermost in sys._current_frames().items():
            frame: FrameType | None = innermost
            found[ident] = []
            while frame is not None:
                found[ident].append(frame.f_code)
                frame = frame.f_back
    return found
