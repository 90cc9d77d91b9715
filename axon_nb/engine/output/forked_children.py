"""Gives processes that a rank forks what a plain process has: standard output that is shown, and default signals.

A rank's `sys.stdout` and `sys.stderr` send over ZeroMQ from a thread, which a forked child does not have. The child
writes to descriptors 1 and 2 instead, whose files the rank reads and shows. ipyparallel's handler of SIGTERM and our
handler of SIGINT concern the rank: in a child, `terminate` would have no effect. Handlers that the user has installed
are inherited, as always.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from functools import partial
from typing import Any

from axon_nb.engine.output.streams import NativeOutput

_SIGSET_BYTES = 128
"""The largest `sigset_t` of the platforms that torch supports, Linux's."""
_FATAL = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)


def install_fork_defaults(own_signal: int, output: NativeOutput) -> None:
    """Have every child that this rank forks from now on start with default signal handlers and plain streams.

    Call it once: what is registered for forks stays.

    Args:
        own_signal: A signal besides SIGINT that interrupts cells.
        output: The rank's output.
    """
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        own_signal: signal.SIG_DFL,
    }
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
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=_Child(defaults, output).become_plain)
    os.register_at_fork(before=one_fork.acquire, after_in_parent=one_fork.release, after_in_child=one_fork.release)
    os.register_at_fork(after_in_child=unblock)


class _Child:
    """What a child needs that a rank has forked."""

    def __init__(self, defaults: dict[int, Any], output: NativeOutput) -> None:
        self._defaults = defaults
        self._engine_handlers = {number: signal.getsignal(number) for number in defaults}
        """The rank's own handlers, by signal."""
        self._output = output

    def become_plain(self) -> None:
        signal.set_wakeup_fd(-1)  # it belongs to the rank's event loop
        for number, handler in self._engine_handlers.items():
            if signal.getsignal(number) == handler:
                signal.signal(number, self._defaults[number])
        for stream in self._output.streams:
            plain = _PlainStream(stream.fileno())
            vars(stream).update(write=plain.write, flush=plain.flush)


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
