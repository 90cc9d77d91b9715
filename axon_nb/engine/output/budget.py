"""Limits what a rank prints during one cell, and how often it is sent."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import Any

from axon_nb.engine.output.streams import NativeOutput
from axon_nb.records.protocol.cells import Omitted, stream_content

_FIRST_FLUSH_S = 0.004
_STEADY_FLUSH_S = 0.05
_PAUSE_S = 0.2
_TAIL_LINES = 40
_MIN_REDRAW_S = 0.05
_MAX_REDRAW_LENGTH = 2048
"""In characters; a longer line with a carriage return is not a progress bar."""


class OutputBudget:
    """Limits what `sys.stdout` and `sys.stderr` send during one cell, and sends the last dropped lines at its end."""

    def __init__(self, kernel: Any, native: NativeOutput, limit: int) -> None:
        self._kernel = kernel
        self._native = native
        self._limit = limit
        self._lock = threading.Lock()
        self._remaining = limit
        self._streams = {name: _LimitedStream(getattr(sys, name), self, native) for name in ("stdout", "stderr")}

    def begin(self, limit: int | None = None) -> None:
        """Reset the budget for a new cell, to `limit` characters (None: the previous limit)."""
        self._send_rest()
        with self._lock:
            self._limit = limit or self._limit
            self._remaining = self._limit

    def end(self) -> None:
        """Send pending output at the end of a cell; what comes before the next one has a budget, too."""
        self._restore_streams()
        self._native.drain(wait=True)
        self._send_rest()
        for limited in self._streams.values():
            limited.send_pending()
        with self._lock:
            self._remaining = self._limit

    def _send_rest(self) -> None:
        """Send the last dropped lines, and how much was dropped."""
        for name, stream in self._streams.items():
            stream.flush_redraw()
            if (omitted := stream.take_omitted()) is not None:
                self._send(name, *omitted)

    def _restore_streams(self) -> None:
        """Replace `sys.stdout` and `sys.stderr` if the cell broke them: ipykernel replies only if it can flush both."""
        for name, limited in self._streams.items():
            if (stream := getattr(sys, name)) is not limited.stream:
                try:
                    stream.flush()
                except Exception:
                    setattr(sys, name, limited.stream)

    def spend(self, size: int) -> bool:
        """Use up `size` characters of the budget; return whether they may be sent."""
        with self._lock:
            self._remaining -= size
            return self._remaining >= 0

    def _send(self, name: str, tail: str, omitted: Omitted) -> None:
        kernel = self._kernel
        self._streams[name].stream.flush()
        kernel.session.send(
            kernel.iopub_socket,
            "stream",
            stream_content(name, tail, omitted),
            parent=kernel.get_parent("shell"),
            ident=f"engine.{kernel.engine_id}.{name}".encode(),
        )


class _LimitedStream:
    """Wraps the methods of a stream in place, so that existing references to it stay valid."""

    def __init__(self, stream: Any, budget: OutputBudget, native: NativeOutput) -> None:
        self.stream = stream
        self._native = native
        self._budget = budget
        self._write = stream.write
        self._flush = stream.flush
        self._pending = False
        self._last = 0.0
        self._dropped_lines = 0
        self._dropped_size = 0
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._partial = ""
        self._last_redraw = 0.0
        self._pending_redraw = ""
        stream.write = self.write
        stream.flush = self.flush

    def write(self, text: str) -> int | None:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        now = time.monotonic()
        if _is_redraw(text):
            # A bar that runs for hours must not use up the cell's budget, nor one in a tight loop the bandwidth.
            if now - self._last_redraw < _MIN_REDRAW_S:
                self._pending_redraw = text
                return len(text)
            self._last_redraw = now
            self._pending_redraw = ""
        else:
            self.flush_redraw()
            if not self._budget.spend(len(text)):
                return self._drop(text)
        return self._forward(text, now)

    def flush_redraw(self) -> None:
        """Send the last state of a bar that was redrawn too soon after the previous one."""
        if self._pending_redraw:
            text, self._pending_redraw = self._pending_redraw, ""
            self._forward(text, time.monotonic())

    def _forward(self, text: str, now: float) -> int | None:
        # The first text after a pause is sent at once, continuous output in larger pieces.
        self.stream.flush_interval = _FIRST_FLUSH_S if now - self._last > _PAUSE_S else _STEADY_FLUSH_S
        self._last = now
        size: int | None = self._write(text)
        self._pending = True  # after the write: a flush by another thread in between would send nothing
        return size

    def flush(self) -> None:
        """Send pending output."""
        self._native.drain()  # values and displays are sent after a flush, so earlier output of C code must come first
        self.send_pending()

    def send_pending(self) -> None:
        """Send what was written, if anything was: each flush of ipykernel's waits for a thread."""
        if self._pending:
            self._pending = False
            self._flush()

    def _drop(self, text: str) -> int:
        self._dropped_size += len(text)
        self._dropped_lines += text.count("\n")
        *lines, self._partial = (self._partial + text)[-65536:].split("\n")
        self._tail.extend(lines)
        return len(text)

    def take_omitted(self) -> tuple[str, Omitted] | None:
        if not self._dropped_size:
            return None
        tail = "\n".join([*self._tail, self._partial])[-16384:]
        kept = tail.count("\n")
        lines, size = max(0, self._dropped_lines - kept), max(0, self._dropped_size - len(tail))
        self._dropped_size = self._dropped_lines = 0
        self._tail.clear()
        self._partial = ""
        return tail, Omitted(lines, size)


def _is_redraw(text: str) -> bool:
    """Whether this text redraws a progress bar, as tqdm does."""
    return text[:1] == "\r" and len(text) <= _MAX_REDRAW_LENGTH and "\n" not in text
