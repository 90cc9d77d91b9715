"""What a rank prints: sent quickly, and no more of it in one cell than its budget.

What C code and child processes write to descriptors 1 and 2 of a rank.

ipykernel reads them from a pipe in a thread of the same process: what is written right before a crash dies with it, and
what comes right before the end of a cell is shown too late or not at all. Here both descriptors are files beside the
rank's log, which outlive the rank; they are read while a cell runs, before each text that Python prints and at the end.

Private hook: `OutStream`'s `_original_stdstream_copy`, to which ipyparallel sends the engine's own log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from ipykernel.iostream import OutStream

__all__ = ["OutputBudget", "RankStream", "drain", "enable_crash_reports"]

_PIECE = 1 << 18
_SKIP_BYTES = 4 << 20
"""Text that comes faster than it is read is skipped up to its last 64 KiB."""
_TAIL_BYTES = 1 << 16
_MAX_FILE_BYTES = 16 << 20
_FAST_S = 0.02
_SLOW_S = 0.2

_MARKS = re.compile(r"^USDT:\S+ \S+ \d+:\d+ \S+\.cpp:\d+\] .*\n", re.MULTILINE)
"""What torch's profiler writes when it begins and ends, for tracers of the system."""

_DESCRIPTORS = {"stdout": 1, "stderr": 2}
_streams: list[RankStream] = []


class RankStream(OutStream):
    """ipykernel's stream, with the descriptor's file in place of its pipe."""

    def __init__(self, session: Any, pub_thread: Any, name: str, **options: Any) -> None:
        self._native: _NativeFile | None = None
        super().__init__(session, pub_thread, name, **{**options, "watchfd": False})  # type: ignore[no-untyped-call]
        descriptor = _DESCRIPTORS[name]
        self._original_stdstream_copy = os.dup(descriptor)
        path = _file_of(descriptor)
        if path is not None:
            self._native = _NativeFile(descriptor, path, self._original_stdstream_copy)
            _streams.append(self)
            if len(_streams) == 1:
                threading.Thread(target=_pump, name="axon_nb-native-output", daemon=True).start()

    def fileno(self) -> int:
        """The descriptor itself: what a child process writes to it is shown as well."""
        return _DESCRIPTORS[self.name]

    def write(self, text: str) -> int:
        """As ipykernel's, after what C code has written before it."""
        if self._native is not None and self._native.changed() and os.getpid() == self._master_pid:
            self.drain()
        return super().write(text) or 0

    def drain(self, *, wait: bool = False) -> bool:
        """Show what has been written to the descriptor; False when there was nothing. `wait` for who does so now."""
        return self._native is not None and self._native.drain(self.write, wait=wait)


class _NativeFile:
    """The file behind a descriptor: written by anyone who appends, read here."""

    def __init__(self, descriptor: int, path: Path, original: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._read = os.fstat(self._file).st_size  # the rank before us, if it was replaced
        self._lock = threading.Lock()
        os.dup2(self._file, descriptor)

    def changed(self) -> bool:
        return os.fstat(self._file).st_size != self._read

    def drain(self, show: Any, *, wait: bool) -> bool:
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            came = False
            while text := self._next():
                came = True
                if told := _MARKS.sub("", text):
                    show(told)
            return came
        finally:
            self._lock.release()

    def _next(self) -> str:
        size = os.fstat(self._file).st_size
        if size < self._read:  # someone has shortened it
            self._read = 0
        note = ""
        if size - self._read > _SKIP_BYTES:
            note = f"… {size - _TAIL_BYTES - self._read:,} bytes left out …\n"
            self._read = size - _TAIL_BYTES
        data = os.pread(self._file, _PIECE, self._read)
        self._read += len(data)
        if not data and self._read > _MAX_FILE_BYTES:
            os.ftruncate(self._file, 0)
            self._read = 0
        return note + data.decode(errors="replace")


def _file_of(descriptor: int) -> Path | None:
    """Where the descriptor's text goes: beside the log to which the rank was forked; None when it was not."""
    with contextlib.suppress(OSError):
        log = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if log.suffix == ".log" and log.is_absolute():
            return log.with_suffix(".out" if descriptor == 1 else ".err")
    return None


def _pump() -> None:
    pause = threading.Event()
    wait_s = _FAST_S
    while True:
        pause.wait(wait_s)
        came = drain()
        wait_s = _FAST_S if came else min(2 * wait_s, _SLOW_S)


def drain(*, wait: bool = False) -> bool:
    """Show what C code and child processes have written; False when that was nothing."""
    came = [stream.drain(wait=wait) for stream in _streams]
    return any(came)


def enable_crash_reports() -> None:
    """Have Python write its stacks to a file beside the log when C code crashes; does nothing on a rank without one."""
    log = _file_of(2)
    if log is not None:
        file = os.open(log.with_suffix(".crash"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.enable(file=file, all_threads=True)


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
