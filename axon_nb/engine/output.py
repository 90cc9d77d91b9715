"""What processes of a rank write: streams, budgets, forked children, errors that IPython shows and swallows.

C code and child processes write to descriptors 1 and 2. ipykernel reads these from a pipe in a thread of the same
process: output right before a crash is lost, and output right before the end of a cell is shown late or never. Here
both descriptors are files beside the rank's log, which survive the rank. They are read while a cell runs, before each
text that Python prints, and at the end of the cell. Private hook: `OutStream`'s `_original_stdstream_copy`, to which
ipyparallel sends the engine's own log.

A rank's `sys.stdout` and `sys.stderr` send over ZeroMQ from a thread, which a forked child does not have. The child
writes to descriptors 1 and 2 instead. ipyparallel's handler of SIGTERM and our handler of SIGINT concern the rank: in a
child, `terminate` would have no effect. Handlers that the user has installed are inherited, as always.

Errors of `%run`, of `get_ipython().run_cell(…)` and of IPython's callbacks appear in a notebook where they happen, and
front ends that run notebooks stop there. On a rank they are written to standard error at once, and the cell fails when
it ends. IPython prints the arguments of a callback that fails, among them the metadata of our request; here only its
name is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import inspect
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ipykernel.iostream import OutStream
from msgspec import Struct
from msgspec.structs import replace

from axon_nb.engine.groups.abort import AbortedError
from axon_nb.records.protocol.cells import AbortLocation, Omitted, stream_content
from axon_nb.shell import user_frame

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
_FIRST_FLUSH_S = 0.004
_STEADY_FLUSH_S = 0.05
_PAUSE_S = 0.2
_TAIL_LINES = 40
_MIN_REDRAW_S = 0.05
_MAX_REDRAW_LENGTH = 2048
"""In characters; a longer line with a carriage return is not a progress bar."""
_SIGSET_BYTES = 128
"""The largest `sigset_t` of the platforms that torch supports, Linux's."""
_FATAL = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
_ABORTS = (AbortedError, KeyboardInterrupt, asyncio.CancelledError)
_NOTE = "The traceback is above: what the cell had called failed, and the cell continued."
_EXIT_NOTE = "The cell counts as failed; the rank keeps running with its state."


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
        for name, limited in self._streams.items():
            if getattr(sys, name) is not limited.stream:  # ipykernel tells only what `sys` has of the cell
                limited.stream.set_parent(self._kernel.get_parent("shell"))
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


def install_fork_defaults(own_signal: int, output: NativeOutput) -> None:
    """Have every child that this rank forks from now on start with default signal handlers and plain streams.

    Call it once: what is registered for forks stays.

    Args:
        own_signal: A signal besides SIGINT that interrupts cells.
        output: The rank's output.
    """
    defaults: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        own_signal: signal.SIG_DFL,
    }
    engine_handlers = {number: signal.getsignal(number) for number in defaults}

    def become_plain() -> None:
        signal.set_wakeup_fd(-1)  # it belongs to the rank's event loop
        for number, handler in engine_handlers.items():
            if signal.getsignal(number) == handler:
                signal.signal(number, defaults[number])
        for stream in output.streams:
            plain = _PlainStream(stream.fileno())
            vars(stream).update(write=plain.write, flush=plain.flush)

    # Python discards the signals that reach a child before its hooks have run, and drops what a hook raises. So signals
    # are blocked meanwhile, by libc: `signal.pthread_sigmask` would run their Python handlers within the hook.
    libc = ctypes.PyDLL(None)
    blocked, mask = (ctypes.create_string_buffer(_SIGSET_BYTES) for _ in range(2))
    libc.sigfillset(blocked)
    for number in _FATAL:
        libc.sigdelset(blocked, int(number))
    block = partial(libc.pthread_sigmask, int(signal.SIG_BLOCK), blocked, mask)
    unblock = partial(libc.pthread_sigmask, int(signal.SIG_SETMASK), mask, None)
    one_fork = threading.RLock()  # `mask` belongs to the thread that forks
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=become_plain)
    os.register_at_fork(before=one_fork.acquire, after_in_parent=one_fork.release, after_in_child=one_fork.release)
    os.register_at_fork(after_in_child=unblock)


class _PlainStream:
    """Writes whole lines to a descriptor, so that lines of several children do not mix."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.RLock()
        self._pending = ""

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        with self._lock:
            self._pending += text
            if "\n" in text or "\r" in text:
                self.flush()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            data, self._pending = self._pending.encode(errors="replace"), ""
            while data:
                data = data[os.write(self._descriptor, data) :]


class NestedError(Struct, frozen=True):
    """The first error of a cell that was shown and swallowed."""

    name: str
    text: str
    aborted_at: AbortLocation | None
    """Where the cell was if it was aborted or interrupted."""
    exit: str | None = None
    """The line that describes a `sys.exit()`; None for other errors."""

    def fail(self, reply: dict[str, Any]) -> None:
        """Make a cell's reply an error."""
        if self.exit is not None:
            traceback = [self.exit, _EXIT_NOTE]
        else:
            traceback = [f"{self.name}: {self.text}", *([] if self.aborted_at else [_NOTE])]
        reply.update(status="error", ename=self.name, evalue=self.text, traceback=traceback)


class NestedErrors:
    """The errors of the running cell that were shown and swallowed."""

    def __init__(self) -> None:
        self._first: NestedError | None = None
        self._in_callback = False
        """Whether IPython shows the error of a callback."""

    def install(self, shell: Any) -> None:
        """Have IPython's events show the errors of their callbacks without the arguments."""
        events = shell.events

        def trigger(event: str, *args: Any, **kwargs: Any) -> None:
            for function in list(events.callbacks[event]):
                try:
                    function(*args, **kwargs)
                except KeyboardInterrupt:
                    shell.showtraceback()
                except Exception:
                    name = getattr(function, "__qualname__", type(function).__name__)
                    sys.stderr.write(f"Error in the callback {name} of IPython's event {event}:\n")
                    before, self._in_callback = self._in_callback, True
                    try:
                        shell.showtraceback()
                    finally:
                        self._in_callback = before

        events.trigger = trigger

    def is_nested(self, shell: Any) -> bool:
        """Whether the error that IPython is about to show is not the one with which the cell ends."""
        if getattr(shell.displayhook, "msg", None) is not None:
            return False  # a value that cannot be shown: ipykernel's reply has its error
        return self._in_callback or user_frame(inspect.currentframe()) is not None

    def note(self, error: BaseException, text: str, rendered: list[str], inner: AbortLocation) -> None:
        """Show an error that IPython will swallow, and remember that the cell has failed.

        Args:
            error: The error.
            text: What `str` gives for it.
            rendered: Its traceback; empty if it has been shown.
            inner: Where it was raised, in what the cell had called.
        """
        if sys.exc_info()[1] is None:  # `%tb` shows an earlier error
            sys.stderr.write("\n".join(rendered) + "\n")
            return
        where = exit_line = None
        frame: FrameType | None = user_frame(inspect.currentframe())
        line = None if frame is None else frame.f_lineno
        if isinstance(error, _ABORTS):
            where = replace(inner, line=line)
        elif isinstance(error, SystemExit):  # IPython's text hides the status in a hint to `%tb`
            exit_line = f"SystemExit at line {line}{inner.within}: sys.exit({error.code!r})"
        elif rendered:
            sys.stderr.write("\n".join(rendered) + "\n")
        if self._first is None:
            self._first = NestedError(type(error).__name__, text, where, exit_line)

    def fail(self, reply: dict[str, Any], aborted_at: AbortLocation | None) -> AbortLocation | None:
        """Make the reply of a cell that has ended an error if there was one; return where the cell was aborted."""
        first, self._first = self._first, None
        if first is None:
            return aborted_at
        if reply["status"] == "ok":
            first.fail(reply)
        return aborted_at or first.aborted_at
