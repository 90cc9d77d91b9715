"""Sends what a rank prints, promptly; `budget` limits how much.

C code and child processes write to descriptors 1 and 2. ipykernel reads these from a pipe in a thread of the same
process: output right before a crash is lost, and output right before the end of a cell is shown late or never. Here
both descriptors are files beside the rank's log, which survive the rank. They are read while a cell runs, before each
text that Python prints, and at the end of the cell.

Private hook: `OutStream`'s `_original_stdstream_copy`, to which ipyparallel sends the engine's own log.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ipykernel.iostream import OutStream

_CHUNK_BYTES = 1 << 18
_SKIP_BYTES = 4 << 20
"""If output arrives faster than it is read, all but its last 64 KiB is skipped."""
_TAIL_BYTES = 1 << 16
_MAX_FILE_BYTES = 16 << 20
_PUNCH_HOLE = 3
"""A mode of Linux's fallocate: free the space, keep the size."""
_MIN_POLL_S = 0.02
_MAX_POLL_S = 0.2

_PROFILER_MARKS = re.compile(r"^USDT:\S+ \S+ \d+:\d+ \S+\.cpp:\d+\] .*\n", re.MULTILINE)
"""Lines that torch's profiler writes at its start and stop for system tracers."""

_fallocate: Any = getattr(ctypes.CDLL(None), "fallocate", None)

_DESCRIPTORS = {"stdout": 1, "stderr": 2}


class RankStream(OutStream):
    """ipykernel's stream with a file instead of a pipe behind the descriptor."""

    def __init__(self, session: Any, pub_thread: Any, name: str, **options: Any) -> None:
        self._native: _NativeFile | None = None
        super().__init__(session, pub_thread, name, **{**options, "watchfd": False})  # type: ignore[no-untyped-call]
        descriptor = _DESCRIPTORS[name]
        self._original_stdstream_copy = os.dup(descriptor)
        path = _output_file(descriptor)
        if path is not None:
            self._native = _NativeFile(descriptor, path, self._original_stdstream_copy)

    @property
    def has_file(self) -> bool:
        """Whether the descriptor is a file; it is not if the rank was not forked."""
        return self._native is not None

    def fileno(self) -> int:
        """The descriptor itself, so that output of child processes is shown, too."""
        return _DESCRIPTORS[self.name]

    def write(self, text: str) -> int:
        """Write text, after any pending output of C code."""
        if self._native is not None and self._native.changed() and os.getpid() == self._master_pid:
            self.drain()
        return super().write(text) or 0

    def drain(self, *, wait: bool = False) -> bool:
        """Show pending output of the descriptor; return False if there was none. `wait` for a concurrent reader."""
        return self._native is not None and self._native.drain(self.write, wait=wait)


class _NativeFile:
    """The file behind a descriptor: anyone may append to it; it is read here."""

    def __init__(self, descriptor: int, path: Path, original: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._position = os.fstat(self._file).st_size  # skips output of the rank that this one replaces
        self._freed = self._position
        """Up to here the file has no data on disk any more."""
        self._lock = threading.Lock()
        os.dup2(self._file, descriptor)

    def changed(self) -> bool:
        return os.fstat(self._file).st_size != self._position

    def drain(self, show: Any, *, wait: bool) -> bool:
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            has_output = False
            while text := self._read_next():
                has_output = True
                if text_left := _PROFILER_MARKS.sub("", text):
                    show(text_left)
            return has_output
        finally:
            self._lock.release()

    def _read_next(self) -> str:
        size = os.fstat(self._file).st_size
        if size == self._position and size - self._freed <= _MAX_FILE_BYTES:
            return ""
        if size < self._position:  # it was truncated
            self._position = self._freed = 0
        note = ""
        if size - self._position > _SKIP_BYTES:
            note = f"… {size - _TAIL_BYTES - self._position:,} bytes omitted …\n"
            self._position = size - _TAIL_BYTES
        data = os.pread(self._file, _CHUNK_BYTES, self._position)
        self._position += len(data)
        if not data and self._position - self._freed > _MAX_FILE_BYTES:
            self._free()
        return note + data.decode(errors="replace")

    def _free(self) -> None:
        # Not by truncating the file: what somebody appends at that moment would be lost.
        space = ctypes.c_int64(0), ctypes.c_int64(self._position)
        if _fallocate is None or _fallocate(self._file, _PUNCH_HOLE, *space) != 0:  # as NFS before version 4.2
            os.ftruncate(self._file, 0)
            self._position = 0
        self._freed = self._position


def _output_file(descriptor: int) -> Path | None:
    """The file for a descriptor's output, beside the rank's log; None if the rank was not forked."""
    with contextlib.suppress(OSError):
        log = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if log.suffix == ".log" and log.is_absolute():
            return log.with_suffix(".out" if descriptor == 1 else ".err")
    return None


class NativeOutput:
    """What C code and child processes of a rank print."""

    def __init__(self, streams: Iterable[object]) -> None:
        """Wrap the rank's standard output and standard error, as `sys` has them."""
        self.streams = [stream for stream in streams if isinstance(stream, RankStream) and stream.has_file]

    def start(self) -> None:
        """Show it promptly from now on, from a thread."""
        if self.streams:
            threading.Thread(target=self._pump, name="axon_nb-native-output", daemon=True).start()

    def _pump(self) -> None:
        pause = threading.Event()
        wait_s = _MIN_POLL_S
        while True:
            pause.wait(wait_s)
            has_output = self.drain()
            wait_s = _MIN_POLL_S if has_output else min(2 * wait_s, _MAX_POLL_S)

    def drain(self, *, wait: bool = False) -> bool:
        """Show pending output; return False if there was none."""
        has_output = [stream.drain(wait=wait) for stream in self.streams]
        return any(has_output)


def enable_crash_reports() -> None:
    """Have Python write its stacks to a file beside the log when C code crashes; does nothing without a log."""
    log = _output_file(2)
    if log is not None:
        file = os.open(log.with_suffix(".crash"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.enable(file=file, all_threads=True)
