"""Starting the host agent and the controller before anyone asks for ranks, in the background."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from concurrent.futures import Future

from ipyparallel.serialize import serialize_object

from axon_nb.cluster.launch.connection import Connection, open_new
from axon_nb.records.protocol.agent import GetInfo

__all__ = ["begin", "discard", "take", "wait_until_idle"]

_lock = threading.Lock()
_pending: list[Future[Connection]] = []


def begin() -> None:
    """Start warming up, unless that is under way."""
    with _lock:
        if _pending:
            return
        future: Future[Connection] = Future()
        _pending.append(future)

    def work() -> None:
        try:
            connection = open_new()
            serialize_object(None)  # the first use imports NumPy, which would be part of the first call's time
            future.set_result(connection)
        except BaseException as error:
            future.set_exception(error)

    atexit.register(discard)
    threading.Thread(target=work, name="axon_nb-warm-up", daemon=True).start()


def take(timeout_s: float) -> Connection:
    """The warm connection, waited for; a fresh one when there is none or it went wrong.

    Raises:
        StartError: the fresh one did not come up either.
    """
    with _lock:
        future = _pending.pop() if _pending else None
    if future is not None:
        try:
            connection = future.result(timeout_s)
            if not connection.agent.closed.is_set():
                return connection
            connection.close()
        except Exception:  # what kept the warm-up from working is told by the fresh start if it lasts
            pass
    return open_new()


def discard() -> None:
    """End a warm-up that nobody took."""
    with _lock:
        future = _pending.pop() if _pending else None
    if future is not None:
        with contextlib.suppress(Exception):  # it never came up, or is gone already
            future.result(30.0).stop()


def wait_until_idle(timeout_s: float) -> bool:
    """Wait until the warm agent has imported all it wants to; False without one, or after `timeout_s` seconds."""
    with _lock:
        future = _pending[0] if _pending else None
    end = time.monotonic() + timeout_s
    while future is not None and time.monotonic() < end:
        if future.result(timeout_s).agent.call(GetInfo()).idle:
            return True
        time.sleep(0.05)
    return False
