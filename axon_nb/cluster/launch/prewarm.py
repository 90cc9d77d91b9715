"""Start the host agent and the controller in the background, before ranks are needed."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from concurrent.futures import Future

from axon_nb.cluster.launch.connection import Connection, open_new
from axon_nb.records.protocol.agent import GetInfo


class Prewarm:
    """The warm connection of one notebook: to a host agent that no cluster uses yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: Future[Connection] | None = None

    def start(self) -> None:
        """Start the warm-up, unless there is one."""
        future: Future[Connection] = Future()
        with self._lock:
            if self._pending is not None:
                return
            self._pending = future

        def work() -> None:
            try:
                future.set_result(open_new())
            except BaseException as error:
                future.set_exception(error)

        atexit.register(self.discard)
        threading.Thread(target=work, name="axon_nb-warm-up", daemon=True).start()

    def take(self, timeout_s: float) -> Connection:
        """Wait for the warm connection and return it; open a new one if there is none or it failed.

        Args:
            timeout_s: How long to wait for the warm one, in seconds.

        Raises:
            StartError: the new one failed, too.
        """
        future = self._pop()
        if future is not None:
            try:
                connection = future.result(timeout_s)
                if not connection.agent.closed.is_set():
                    return connection
                connection.close()
            except Exception:  # if the cause persists, the new start reports it
                pass
        return open_new()

    def discard(self) -> None:
        """Stop a warm-up that was not used."""
        future = self._pop()
        if future is not None:
            with contextlib.suppress(Exception):  # it failed to start, or is gone already
                future.result(30.0).stop()

    def _pop(self) -> Future[Connection] | None:
        with self._lock:
            future, self._pending = self._pending, None
        return future

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until the agent has finished its imports; False if there is none, or after `timeout_s` seconds."""
        with self._lock:
            future = self._pending
        end = time.monotonic() + timeout_s
        while future is not None and time.monotonic() < end:
            if future.result(timeout_s).agent.call(GetInfo()).idle:
                return True
            time.sleep(0.05)
        return False
