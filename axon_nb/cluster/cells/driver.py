"""Run a cell to completion: in a coroutine, in a thread that blocks, or in the background."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from axon_nb.cluster.cells.kernel_interrupts import InterruptQueue
from axon_nb.cluster.cells.result import CellResult
from axon_nb.cluster.cells.run import CellRun
from axon_nb.records.ranks import name_ranks

T = TypeVar("T")
RunsCell = Callable[..., Awaitable[CellResult]]
"""`Cluster.run_async`, or `Cluster.run` as `awaitable` returns it."""

_POLL_S = 0.05
"""How often a caller that has to raise looks whether its ranks have stopped."""


async def run_to_completion_async(
    run: CellRun, interrupts: InterruptQueue, finish: Callable[[], CellResult]
) -> CellResult:
    """Step `run` until it is done, in a coroutine, and return its result; widgets stay clickable.

    Interrupts go to the ranks. If the task is cancelled, or anything else is raised here, the ranks stop first.
    """
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # a late message may find the loop closed
            loop.call_soon_threadsafe(woken.set)

    run.wake, run.stepper = wake, threading.current_thread()
    try:
        interrupts.forward_to(run.interrupt)
        while not run.step():
            timer = loop.call_later(run.poll_interval(), woken.set)
            try:
                await woken.wait()
            except asyncio.CancelledError:
                if not interrupts.has_cancelled():
                    raise
                run.interrupt()
            finally:
                timer.cancel()
            woken.clear()
            if interrupts.raised is not None:
                raise interrupts.raised
    except BaseException as error:
        handle = _interrupted(run, finish)
        while not (handle.done() or isinstance(error, GeneratorExit)):
            with contextlib.suppress(asyncio.CancelledError):  # anyio cancels a task again and again
                await asyncio.sleep(_POLL_S)
        handle.explain(error)
        raise
    return finish()


def run_to_completion(run: CellRun, interrupts: InterruptQueue, finish: Callable[[], CellResult]) -> CellResult:
    """Step `run` until it is done, blocking this thread, and return its result.

    On the main thread, interrupts go to the ranks. If anything is raised here, such as by the handler of another
    signal, the ranks stop first.
    """
    try:
        interrupts.forward_to(run.interrupt)
        _step_to_end(run)
    except BaseException as error:
        stop_for(error, run, finish)
        raise
    return finish()


def stop_for(error: BaseException, run: CellRun, finish: Callable[[], CellResult]) -> None:
    """Interrupt a cell because its caller has to raise `error`, and wait until the ranks have stopped."""
    handle = _interrupted(run, finish)
    handle.wait()
    handle.explain(error)


def _step_to_end(run: CellRun) -> None:
    woken = threading.Event()
    run.wake, run.stepper = woken.set, threading.current_thread()
    while not run.step():
        woken.wait(run.poll_interval())
        woken.clear()


def _interrupted(run: CellRun, finish: Callable[[], CellResult]) -> CellHandle:
    """Interrupt a cell that its caller leaves: a thread steps it to its end, whatever else the caller has to raise."""
    run.interrupt()
    return CellHandle(run, finish)


def awaitable(run: Callable[..., CellResult]) -> RunsCell:
    """Return a function that blocks as one that can be awaited, for coroutines that serve both."""

    async def awaited(code: str, **options: Any) -> CellResult:
        return run(code, **options)

    return awaited


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine without an event loop; it awaits only what `awaitable` returns."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("the coroutine waits")


class CellHandle:
    """A cell that runs in the background (`--noblock`), and its result once it is done."""

    def __init__(self, run: CellRun, finish: Callable[[], CellResult]) -> None:
        self._run = run
        self._future: Future[CellResult] = Future()
        # The context says which notebook cell the output belongs to.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._complete, finish), name="axon_nb-cell", daemon=True
        )
        self._thread.start()

    def _complete(self, finish: Callable[[], CellResult]) -> None:
        try:
            _step_to_end(self._run)
            self._future.set_result(finish())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self, timeout: float | None = None) -> CellResult:
        """Wait for the cell's result, at most `timeout` seconds.

        Raises:
            CellError: a rank failed.
            KeyboardInterrupt: the cell was cancelled.
            TimeoutError: it is still running.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        """Whether the cell is done."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the cell is done, failed or not, at most `timeout` seconds; return whether it is."""
        self._thread.join(timeout)
        return self.done()

    def explain(self, error: BaseException) -> None:
        """Add to `error`, for which the cell was interrupted, what became of the ranks."""
        if self.done() and (end := self._future.exception()) is not None:
            error.add_note(f"The cell was interrupted. {end}")

    def text(self) -> dict[int, str]:
        """Return what each rank has printed so far; at most about a million characters each."""
        return {rank: self._run.output.text(rank) for rank in self._run.ranks}

    def cancel(self) -> None:
        """Interrupt the cell on its ranks; `result` then raises KeyboardInterrupt."""
        if not self.done():
            self._run.interrupt()

    def __repr__(self) -> str:
        state = "done" if self.done() else f"running on {name_ranks(self._run.unfinished)}"
        return f"CellHandle({state})"
