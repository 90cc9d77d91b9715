"""Gives processes that a rank forks what a plain process has: standard output that is shown, and default signals.

A rank's `sys.stdout` and `sys.stderr` send over ZeroMQ from a thread, which a forked child does not have. The child
writes to descriptors 1 and 2 instead, whose files the rank reads and shows. ipyparallel's handler of SIGTERM and our
handler of SIGINT concern the rank: in a child, `terminate` would have no effect. Handlers that the user has installed
are inherited, as always.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from axon_nb.engine.output.streams import own_streams

__all__ = ["install_fork_defaults"]

_DEFAULTS: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
_BLOCKED = signal.valid_signals() - {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
_engine_handlers: dict[int, Any] = {}
"""The rank's own handlers, by signal."""
_thread = threading.local()
"""`mask`: the signals that this thread had blocked before it forked."""


def install_fork_defaults(own_signal: int) -> None:
    """Have every child that this rank forks from now on start with default signal handlers and plain streams.

    Args:
        own_signal: A signal besides SIGINT that interrupts cells.
    """
    installed = bool(_engine_handlers)
    _DEFAULTS[own_signal] = signal.SIG_DFL
    _engine_handlers.update({number: signal.getsignal(number) for number in _DEFAULTS})
    if not installed:
        os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_become_plain)


def _block() -> None:
    # Python discards the signals that reach a child before its hooks have run.
    _thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _thread.mask)


def _become_plain() -> None:
    signal.set_wakeup_fd(-1)  # it belongs to the rank's event loop
    for number, handler in _engine_handlers.items():
        if signal.getsignal(number) == handler:
            signal.signal(number, _DEFAULTS[number])
    for stream in own_streams():
        plain = _PlainStream(stream.fileno())
        vars(stream).update(write=plain.write, flush=plain.flush)
    _unblock()


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
