"""What C code and child processes write to descriptors 1 and 2 of a rank.

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
import threading
from pathlib import Path
from typing import Any

from ipykernel.iostream import OutStream

__all__ = ["RankStream", "drain", "keep_crash_reports"]

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


def keep_crash_reports() -> None:
    """Have Python write its stacks to a file beside the log when C code crashes; does nothing on a rank without one."""
    log = _file_of(2)
    if log is not None:
        file = os.open(log.with_suffix(".crash"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.enable(file=file, all_threads=True)
