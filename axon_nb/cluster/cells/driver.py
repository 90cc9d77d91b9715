"""Stepping a running cell to its end: from a coroutine, or from a thread that blocks.

A cell that runs in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future

from axon_nb.cluster.cells.kernel_interrupts import Presses
from axon_nb.cluster.cells.result import CellResult
from axon_nb.cluster.cells.run import CellRun
from axon_nb.records.ranks import format_ranks

__all__ = ["CellHandle", "drive", "drive_blocking"]

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


class CellHandle:
    """What `--noblock` returns: the result when it is there."""

    def __init__(self, run: CellRun, end: Callable[[], CellResult]) -> None:
        self._run = run
        self._future: Future[CellResult] = Future()
        # The context carries which notebook cell output belongs to.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._drive, end), name="axon_nb-cell", daemon=True)
        self._thread.start()

    def _drive(self, end: Callable[[], CellResult]) -> None:
        try:
            drive_blocking(self._run, Presses())
            self._future.set_result(end())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self, timeout: float | None = None) -> CellResult:
        """Wait for the cell, at most `timeout` seconds.

        Raises:
            CellError: a rank failed.
            KeyboardInterrupt: the cell was cancelled.
            TimeoutError: it still runs.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        """Whether the cell is over."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the cell's end, whichever it is, at most `timeout` seconds; whether it has come."""
        self._thread.join(timeout)
        return self.done()

    def cancel(self) -> None:
        """Interrupt the cell on its ranks; `result` then raises KeyboardInterrupt."""
        if not self.done():
            self._run.interrupt()

    def __repr__(self) -> str:
        state = "done" if self.done() else f"running on ranks {format_ranks(self._run.unfinished)}"
        return f"CellHandle({state})"
