"""Stepping a running cell to its end: from a coroutine, or from a thread that blocks."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from axon_nb.cluster.cell import CellRun
from axon_nb.cluster.presses import Presses

__all__ = ["drive", "drive_blocking"]

# Python's signal handlers run between two steps of the main thread: a loop that sleeps longer notices Ctrl-C late.
_MAX_WAIT_S = 0.05


async def drive(run: CellRun, presses: Presses) -> None:
    """Step `run` to its end in a coroutine; widgets stay clickable meanwhile. An interrupt goes to the ranks."""
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed by a late message
            loop.call_soon_threadsafe(woken.set)

    run.wake = wake
    presses.hand_to(run.interrupt)
    while not run.step():
        timer = loop.call_later(min(run.patience(), _MAX_WAIT_S), woken.set)
        try:
            await woken.wait()
        except asyncio.CancelledError:  # ipykernel's way to tell of a press before ours were caught
            run.interrupt()
        finally:
            timer.cancel()
        woken.clear()


def drive_blocking(run: CellRun, presses: Presses) -> None:
    """Step `run` to its end, blocking this thread; on the main thread an interrupt goes to the ranks."""
    woken = threading.Event()
    run.wake = woken.set
    presses.hand_to(run.interrupt)
    while not run.step():
        woken.wait(min(run.patience(), _MAX_WAIT_S))
        woken.clear()
