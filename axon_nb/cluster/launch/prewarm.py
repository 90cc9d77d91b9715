"""Start the host agent and the controller in the background, before ranks are needed."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from concurrent.futures import Future

from axon_nb.cluster.launch.connection import Connection, open_new
from axon_nb.records.protocol.agent import GetInfo

__all__ = ["discard", "start", "take", "wait_until_idle"]

_lock = threading.Lock()
_pending: list[Future[Connection]] = []


def start() -> None:
    """Start the warm-up, unless there is one."""
    with _lock:
        if _pending:
            return
        future: Future[Connection] = Future()
        _pending.append(future)

    def work() -> None:
        try:
            future.set_result(open_new())
        except BaseException as error:
            future.set_exception(error)

    atexit.register(discard)
    threading.Thread(target=work, name="axon_nb-warm-up", daemon=True).start()


def take(timeout_s: float) -> Connection:
    """Wait for the warm connection and return it; open a new one if there is none or it failed.

    Args:
        timeout_s: How long to wait for the warm one, in seconds.

    Raises:
        StartError: the new one failed, too.
    """
    with _lock:
        future = _pending.pop() if _pending else None
    if future is not None:
        try:
            connection = future.result(timeout_s)
            if not connection.agent.closed.is_set():
                return connection
            connection.close()
        except Exception:  # if the cause persists, the new start reports it
            pass
    return open_new()


def discard() -> None:
    """Stop a warm-up that was not used."""
    with _lock:
        future = _pending.pop() if _pending else None
    if future is not None:
        with contextlib.suppress(Exception):  # it failed to start, or is gone already
            future.result(30.0).stop()


def wait_until_idle(timeout_s: float) -> bool:
    """Wait until the warm agent has finished its imports; False if there is none, or after `timeout_s` seconds."""
    with _lock:
        future = _pending[0] if _pending else None
    end = time.monotonic() + timeout_s
    while future is not None and time.monotonic() < end:
        if future.result(timeout_s).agent.call(GetInfo()).idle:
            return True
        time.sleep(0.05)
    return False
