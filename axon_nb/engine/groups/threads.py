"""Helper threads for waits that only C++ can do; reused, and left behind when stuck."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["run_in_helper"]

_idle: list[queue.SimpleQueue[Callable[[], None]]] = []


def run_in_helper(work: Callable[[], None]) -> None:
    """Run `work` in a daemon thread; the thread waits for more when it is done."""
    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(jobs,), name="axon_nb-wait", daemon=True).start()
    jobs.put(work)


def _serve(jobs: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()
        _idle.append(jobs)
