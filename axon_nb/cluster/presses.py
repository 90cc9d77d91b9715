"""Presses of the stop button (SIGINT) while a cell is sent, runs and ends: counted, and handed to the cell."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Presses", "caught"]


class Presses:
    """The presses since a cell was begun; made by `caught`."""

    def __init__(self) -> None:
        self.count = 0
        self._heed: Callable[[], None] | None = None

    def hand_to(self, heed: Callable[[], None]) -> None:
        """Have `heed` called at each press from now on; at once if there was one already."""
        self._heed = heed
        if self.count:
            heed()

    def press(self) -> None:
        """The button was pressed."""
        self.count += 1
        if self._heed is not None:
            self._heed()


# Cells that are awaited side by side begin and end in any order: one handler serves them all.
_active: list[Presses] = []
_turning: list[Presses] = []
"""Those that come or go: the handler is in place before they are active, and a little longer."""
_previous: list[Any] = []


@contextlib.contextmanager
def caught() -> Iterator[Presses]:
    """From here on a press interrupts nothing but the cell; elsewhere than on the main thread there are none.

    Raises:
        KeyboardInterrupt: at the end, when the button was pressed and what was done in between did not fail.
    """
    presses = Presses()
    if threading.current_thread() is not threading.main_thread():
        yield presses
        return
    _turning[:] = [presses]
    if not _active:
        _previous[:] = [signal.signal(signal.SIGINT, _on_sigint)]
    _active.append(presses)
    _turning.clear()
    try:
        yield presses
    finally:
        _turning[:] = [presses]
        _active.remove(presses)
        if not _active:
            signal.signal(signal.SIGINT, _previous.pop())
        _turning.clear()
    if presses.count:
        raise KeyboardInterrupt


def _on_sigint(number: int, frame: Any) -> None:
    for presses in [*_turning, *_active]:
        presses.press()
