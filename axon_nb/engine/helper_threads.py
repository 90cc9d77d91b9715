"""Threads for waits in C++, which nothing can interrupt: whoever starts one may stop waiting for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

_POLL_S = 0.02


class HelperThreads:
    """Daemon threads that are reused when they are done; one that gets stuck is left alone."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread."""
        try:
            jobs = self._idle.pop()
        except IndexError:
            jobs = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(jobs,), name="axon_nb-wait", daemon=True).start()
        jobs.put(work)

    def _serve(self, jobs: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            jobs.get()()
            self._idle.append(jobs)


class _Connector(threading.Thread):
    """Builds one backend."""

    def __init__(self, build: Callable[[], Any], dispose: Callable[[Any], None]) -> None:
        super().__init__(name="axon_nb-connect", daemon=True)
        self._build = build
        self._dispose = dispose
        self._lock = threading.Lock()
        self.backend: Any = None
        self.error: BaseException | None = None
        self.is_abandoned = False
        """Whether nobody waits for the backend any more."""
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self.backend = self._build()
        except BaseException as error:
            self.error = error
        with self._lock:
            is_late = self.is_abandoned
            self.done.set()
        if is_late and self.error is None:
            self._dispose(self.backend)

    def abandon(self) -> None:
        """Stop waiting; the backend is disposed of in a thread, now or when it arrives."""
        with self._lock:
            self.is_abandoned = True
            if self.done.is_set() and self.error is None:
                threading.Thread(target=self._dispose, args=(self.backend,), daemon=True).start()


def is_abandoned() -> bool:
    """Whether this thread connects for somebody who has stopped waiting: its own waits may end."""
    thread = threading.current_thread()
    return isinstance(thread, _Connector) and thread.is_abandoned


def connect_in_helper(
    build: Callable[[], Any],
    *,
    raise_if_cancelled: Callable[[], None],
    timeout_s: float,
    dispose: Callable[[Any], None],
) -> Any:
    """Return what `build` returns, called in a thread that is abandoned if the wait ends first.

    Args:
        build: Connects in C++, where nothing can interrupt it.
        raise_if_cancelled: Called every 20 ms; raises to end the wait.
        timeout_s: Seconds to wait.
        dispose: Disposes of a backend that arrives too late.

    Raises:
        RuntimeError: connecting timed out or failed.
    """
    connector = _Connector(build, dispose)
    try:
        connector.start()
        end = time.monotonic() + timeout_s
        while not connector.done.wait(_POLL_S):
            raise_if_cancelled()
            if time.monotonic() > end:
                raise RuntimeError(f"connecting timed out after {timeout_s:g} s")
    except BaseException:  # an interrupt may land anywhere here
        connector.abandon()
        raise
    if connector.error is not None:
        raise connector.error
    return connector.backend
