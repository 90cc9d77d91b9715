"""SIGINT on a rank: it ends the user's code and nothing else.

Ending code that swallows every interrupt: raising where nothing catches it.

`while True: try: … except: pass` takes whatever is raised within its `try`. Between two rounds there is a line that is
in no `try`, and a trace function sees it come. Private hook: the table of a code object that says which of its parts
are guarded, read by `dis._parse_exception_table`; where that is missing, such a loop goes on until it is given up.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from axon_nb.engine.user_frame import user_frame

__all__ = ["Interrupts", "desist", "insist"]

_parse: Callable[[CodeType], list[Any]] | None = getattr(dis, "_parse_exception_table", None)


def insist(frame: FrameType | None, outermost: FrameType) -> None:
    """Raise KeyboardInterrupt at the first line from here on that no `try` and no `with` guards.

    Args:
        frame: The innermost frame.
        outermost: The frame of the cell; what called it takes the exception.
    """
    if _parse is None:
        return

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not _is_guarded(frame, outermost):
            raise KeyboardInterrupt
        return trace

    while frame is not None:
        frame.f_trace = trace
        if frame is outermost:
            break
        frame = frame.f_back
    sys.settrace(trace)


def desist() -> None:
    """The cell has ended."""
    sys.settrace(None)


def _is_guarded(frame: FrameType | None, outermost: FrameType) -> bool:
    while frame is not None:
        if any(start <= frame.f_lasti < end for start, end in _guarded(frame.f_code)):
            return True
        if frame is outermost:
            return False
        frame = frame.f_back
    return True  # not under the cell: some callback, which is left alone


@functools.lru_cache(maxsize=256)
def _guarded(code: CodeType) -> tuple[tuple[int, int], ...]:
    return tuple((entry.start, entry.end) for entry in _parse(code)) if _parse is not None else ()


_SWALLOWED = 3
"""After so many interrupts that have not ended the cell, the next is raised where nothing catches it."""


class Interrupts:
    """The SIGINT handler that stays installed for the life of the rank.

    Args:
        kernel: The engine's kernel.
        holds: Whether an interrupt that lands on this frame is put off; who says so raises it later.
    """

    def __init__(self, kernel: Any, holds: Callable[[FrameType | None], bool]) -> None:
        self._kernel = kernel
        self._holds = holds
        self.task: Any = None
        """The task of the async cell that runs; None while none does."""
        self.raised = 0
        """Interrupts that were raised in the cell."""
        self.running = False
        """Whether a cell runs; outside of cells an interrupt is dropped."""
        self.unheard = 0
        """Interrupts that were sent and that the main thread has not noticed: it is in C code."""
        self.refused: deque[str] = deque(maxlen=64)
        """Cells that were interrupted before they have begun here, by the notebook's name for the run."""

    def begin_cell(self) -> None:
        """A cell begins."""
        self.raised = 0
        self.running = True

    def end_cell(self) -> None:
        """It has ended."""
        self.running = False
        if self.raised > _SWALLOWED:
            desist()

    def install(self) -> None:
        """Take over SIGINT; call it on the main thread."""
        signal.signal(signal.SIGINT, self._on_sigint)

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        self.unheard = 0
        if not self.running:
            return
        own = user_frame(frame)
        if own is not None:
            if self._holds(frame):
                return
            self.raised += 1
            if self.raised > _SWALLOWED:
                insist(frame, own)
            raise KeyboardInterrupt
        if self.task is not None and not self.task.done():
            self._kernel.io_loop.asyncio_loop.call_soon_threadsafe(self.task.cancel)

    @contextlib.contextmanager
    def hold_async(self, task: Any) -> Iterator[None]:
        """While an async cell runs: an interrupt cancels its task."""
        self.task = task
        try:
            yield
        finally:
            self.task = None

    def interrupt(self, run: str | None = None) -> bool:
        """From any thread: interrupt the cell; False when none runs: then `run` is refused when it comes."""
        if self.running:
            self.unheard += 1
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        elif run is not None:
            self.refused.append(run)
        return self.running
