"""Stepping a running cell to its end: from a coroutine, or from a thread that blocks."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from axon_nb.cluster.cell import CellRun

__all__ = ["drive", "drive_blocking"]

# Python's signal handlers run between two steps of the main thread: a loop that sleeps longer notices Ctrl-C late.
_MAX_WAIT_S = 0.05


async def drive(run: CellRun) -> None:
    """Step `run` to its end in a coroutine; widgets stay clickable meanwhile. An interrupt goes to the ranks."""
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed by a late message
            loop.call_soon_threadsafe(woken.set)

    run.wake = wake
    with _sigint(run.interrupt):
        while not run.step():
            timer = loop.call_later(min(run.patience(), _MAX_WAIT_S), woken.set)
            try:
                await woken.wait()
            except asyncio.CancelledError:
                run.interrupt()
            finally:
                timer.cancel()
            woken.clear()


def drive_blocking(run: CellRun) -> None:
    """Step `run` to its end, blocking this thread; on the main thread an interrupt goes to the ranks."""
    woken = threading.Event()
    run.wake = woken.set
    with _sigint(run.interrupt):
        while not run.step():
            try:
                woken.wait(min(run.patience(), _MAX_WAIT_S))
            except KeyboardInterrupt:
                run.interrupt()
            woken.clear()


@contextlib.contextmanager
def _sigint(handler: Callable[[], None]) -> Iterator[None]:
    # ipykernel delivers only the first Ctrl-C of a cell, as a cancellation; ours counts them all.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_sigint(number: int, frame: Any) -> None:
        handler()

    previous = signal.signal(signal.SIGINT, on_sigint)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
