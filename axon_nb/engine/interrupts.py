"""SIGINT on a rank: it ends the user's code and nothing else."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from axon_nb.engine.insist import desist, insist
from axon_nb.engine.user_frame import user_frame

__all__ = ["Interrupts"]

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
