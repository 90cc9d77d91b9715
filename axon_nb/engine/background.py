"""Threads that may still communicate while the main thread waits, or when it has ended the cell."""

from __future__ import annotations

import os
import threading
from types import CodeType

from axon_nb.engine.frames import code_by_thread
from axon_nb.engine.libraries import library_of

__all__ = ["users_threads"]

_COMMUNICATES = os.path.join("", "torch", "distributed", "")


def users_threads() -> list[str]:
    """Names of the threads that run the user's code, communicate or wait to begin (`threading.Timer`) right now.

    Those of libraries run code of their own: of data loaders, progress bars, log writers. One of a pool that has
    nothing to do gets work from the user's code alone, and so counts when that runs.
    """
    running = code_by_thread()
    return [
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        and not thread.name.startswith("axon_nb")
        and (isinstance(thread, threading.Timer) or any(map(_may_communicate, running.get(thread.ident or 0, ()))))
    ]


def _may_communicate(code: CodeType) -> bool:
    return not library_of(code.co_filename) or _COMMUNICATES in code.co_filename
