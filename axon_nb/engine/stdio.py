"""What a rank prints: sent quickly, and no more of it in one cell than its budget."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import Any

from axon_nb.engine.native_output import drain

__all__ = ["OutputBudget"]

_FIRST_FLUSH_S = 0.004
_STEADY_FLUSH_S = 0.05
_QUIET_S = 0.2
_TAIL_LINES = 40
_REDRAW_S = 0.05
_MAX_REDRAW = 2048
"""Characters; a longer line with a carriage return is no progress bar."""


class OutputBudget:
    """Limits what `sys.stdout` and `sys.stderr` send during one cell; the last lines are kept and sent at its end.

    A rank that prints without end would otherwise fill the memory of the controller and of the notebook, whose
    message queues have no bound.
    """

    def __init__(self, kernel: Any, limit: int) -> None:
        self._kernel = kernel
        self._limit = limit
        self._lock = threading.Lock()
        self._left = limit
        self._streams = {name: _Limited(getattr(sys, name), self) for name in ("stdout", "stderr")}

    def begin(self, limit: int | None = None) -> None:
        """A cell begins: the budget is whole again, and `limit` characters from now on (None: as before)."""
        with self._lock:
            self._limit = limit or self._limit
            self._left = self._limit

    def end(self) -> None:
        """A cell has ended: send the last lines of what was dropped, and how much that was."""
        for name, stream in self._streams.items():
            stream.show_held()
            dropped = stream.take_dropped()
            if dropped:
                self._send(name, *dropped)

    def spend(self, size: int) -> bool:
        """Whether `size` more characters may be sent."""
        with self._lock:
            self._left -= size
            return self._left >= 0

    def _send(self, name: str, lines: int, size: int, tail: str) -> None:
        content = {"name": name, "text": tail, "dropped": {"lines": lines, "bytes": size}}
        kernel = self._kernel
        getattr(sys, name).flush()
        kernel.session.send(
            kernel.iopub_socket,
            "stream",
            content,
            parent=kernel.get_parent("shell"),
            ident=f"engine.{kernel.engine_id}.{name}".encode(),
        )


class _Limited:
    """One of the two streams, changed in place, so that whoever holds it keeps a working one."""

    def __init__(self, stream: Any, budget: OutputBudget) -> None:
        self._stream = stream
        self._budget = budget
        self._write = stream.write
        self._flush = stream.flush
        self._pending = False
        self._last = 0.0
        self._dropped_lines = 0
        self._dropped_size = 0
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._partial = ""
        self._redrawn = 0.0
        self._held = ""
        stream.write = self.write
        stream.flush = self.flush

    def write(self, text: str) -> int | None:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        now = time.monotonic()
        if _redraws(text):
            # A bar of hours must not use up what the cell may print, nor a bar in a tight loop the bandwidth.
            if now - self._redrawn < _REDRAW_S:
                self._held = text
                return len(text)
            self._redrawn = now
            self._held = ""
        else:
            self.show_held()
            if not self._budget.spend(len(text)):
                return self._drop(text)
        return self._pass(text, now)

    def show_held(self) -> None:
        """Send the last state of a bar that was redrawn too soon after the one before."""
        if self._held:
            text, self._held = self._held, ""
            self._pass(text, time.monotonic())

    def _pass(self, text: str, now: float) -> int | None:
        # The first text after a pause goes out at once, a stream of it in larger pieces.
        self._stream.flush_interval = _FIRST_FLUSH_S if now - self._last > _QUIET_S else _STEADY_FLUSH_S
        self._last = now
        self._pending = True
        return self._write(text)  # type: ignore[no-any-return]

    def flush(self) -> None:
        """Send what is pending."""
        drain()  # values and displays are sent after a flush: what C code wrote before comes before
        # ipykernel flushes both streams several times a request, and each waits for a thread.
        if self._pending:
            self._pending = False
            self._flush()

    def _drop(self, text: str) -> int:
        self._dropped_size += len(text)
        self._dropped_lines += text.count("\n")
        *lines, self._partial = (self._partial + text)[-65536:].split("\n")
        self._tail.extend(lines)
        return len(text)

    def take_dropped(self) -> tuple[int, int, str] | None:
        if not self._dropped_size:
            return None
        tail = "\n".join([*self._tail, self._partial])[-16384:]
        kept = tail.count("\n")
        lines, size = max(0, self._dropped_lines - kept), max(0, self._dropped_size - len(tail))
        self._dropped_size = self._dropped_lines = 0
        self._tail.clear()
        self._partial = ""
        return lines, size, tail


def _redraws(text: str) -> bool:
    """Whether this is a progress bar that draws itself anew, as tqdm does."""
    return text[:1] == "\r" and len(text) <= _MAX_REDRAW and "\n" not in text
