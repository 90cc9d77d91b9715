"""Sends samples to the notebook while it watches, those of a beat in a message; nothing otherwise.

A message costs this rank, the controller and the notebook ten times what a sample does.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

from axon_nb.engine.sampler import Sampler
from axon_nb.engine.session import RankSession
from axon_nb.records.beat import seconds_to_tick

__all__ = ["Telemetry"]

_MAX_HZ = 20.0


class Telemetry:
    """A thread that lives while somebody watches; each watch has a time limit and is renewed by the watcher."""

    def __init__(self, session: RankSession, sampler: Sampler) -> None:
        self._session = session
        self._sampler = sampler
        self._lock = threading.Lock()
        self._until = 0.0
        self._period = 0.1
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()

    def watch(self, *, hz: float, seconds: float) -> None:
        """Sample `hz` times a second for the next `seconds`; zero seconds ends the watch."""
        with self._lock:
            self._period = 1.0 / min(max(hz, 0.1), _MAX_HZ)
            self._until = time.monotonic() + seconds
            self._wake.set()
            if seconds > 0 and (self._thread is None or not self._thread.is_alive()):
                self._wake.clear()
                self._thread = threading.Thread(target=self._run, name="axon_nb-telemetry", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        states: list[dict[str, Any]] = []
        due = 0.0
        while True:
            with self._lock:
                if time.monotonic() >= self._until:
                    self._thread = None
                    return
                period = self._period
            states.append(dataclasses.asdict(self._sampler.sample()))
            now = time.monotonic()
            if now >= due:
                self._send(states)
                states, due = [], now + seconds_to_tick(now=now)
            self._wake.wait(min(period, due - now))
            self._wake.clear()

    def _send(self, states: list[dict[str, Any]]) -> None:
        kernel = self._session.kernel
        content = {"rank": self._session.config.rank, "states": states}
        topic = f"engine.{kernel.engine_id}.axon_telemetry".encode()
        kernel.session.send(kernel.iopub_socket, "axon_telemetry", content, ident=topic)
