"""What the main thread of this rank does right now, read from its stack by another thread.

Sends samples to the notebook while it watches, those of a beat in a message; nothing otherwise.

A message costs this rank, the controller and the notebook ten times what a sample does.
"""

from __future__ import annotations

import os
import threading
import time
from types import FrameType

import torch

from axon_nb.engine.collective_names import PUBLIC_NAMES, find_function, is_public_call
from axon_nb.engine.frames import main_frame
from axon_nb.engine.groups import activity
from axon_nb.engine.session import RankSession
from axon_nb.engine.user_frame import user_frame
from axon_nb.records.protocol.inspection import TelemetryEvent
from axon_nb.records.protocol.messages import message_type
from axon_nb.records.protocol.wire import encode
from axon_nb.records.telemetry import Activity, RankState, seconds_to_tick

__all__ = ["Sampler", "Telemetry", "resident_bytes"]

_WAITING_AFTER_NS = 250_000_000
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Sampler:
    """Takes samples; remembers since when the rank is in the same call."""

    def __init__(self, session: RankSession) -> None:
        self._session = session
        self._key: tuple[object, ...] = ()
        self._since_ns = 0

    def sample(self) -> RankState:
        """One sample, some 20 us."""
        session, now = self._session, time.monotonic_ns()
        cell = session.cell
        frame = main_frame() if cell is not None else None
        line, call, serial = self._look(frame) if cell is not None else (None, "", 0)
        waited = activity.current_wait(threading.main_thread().ident or 0) if cell is not None else None
        if waited is not None and not call:
            # DTensor and functional collectives wait without a function of torch.distributed on the stack.
            call = PUBLIC_NAMES.get(waited.name, waited.name)
        key = (cell, call, waited.number if waited else serial)
        if key != self._key:
            self._key, self._since_ns = key, waited.started_ns if waited else now
        if cell is None:
            doing = Activity.IDLE
        elif not call:
            doing = Activity.RUNNING
        else:
            doing = Activity.WAITING if now - self._since_ns > _WAITING_AFTER_NS else Activity.COLLECTIVE
        return RankState(
            rank=session.config.rank,
            activity=doing,
            time_ns=now,
            cell=cell,
            line=line,
            call=call,
            since_ns=self._since_ns,
            rss_bytes=resident_bytes(),
            device_bytes=_device_bytes(session.device),
        )

    def via(self) -> tuple[str, int]:
        """The function that communicates though its name does not say so, and the number of the call waited for."""
        frame, waited = main_frame(), activity.current_wait(threading.main_thread().ident or 0)
        return find_function(frame, user_frame(frame)), waited.number if waited else 0

    def _look(self, frame: FrameType | None) -> tuple[int | None, str, int]:
        """(line of the cell, communication call, identity of that call's frame)."""
        user = user_frame(frame)
        call, serial = "", 0
        pending = activity.pending()
        while frame is not None and frame is not user:
            code = frame.f_code
            if is_public_call(code):
                call, serial = code.co_name, id(frame)  # the outermost counts: it is what the user called
            elif pending and not call and code.co_name == "_engine_run_backward" and _sleeps():
                # DDP waits for its reductions in C++, at the end of backward.
                call, serial = f"{pending[0].name} (backward)", pending[0].number
            frame = frame.f_back
        return (user.f_lineno if user else None), call, serial


def _sleeps() -> bool:
    """Whether the main thread is off the CPU at this moment."""
    try:
        with open(f"/proc/self/task/{threading.main_thread().native_id}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"R"
    except OSError:
        return True


def resident_bytes() -> int:
    """Resident memory of this process; 0 where nobody knows it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0


def _device_bytes(device: torch.device) -> int:
    # Asking before the first allocation would initialise CUDA on a rank that may never use it.
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_allocated(device))


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
        states: list[RankState] = []
        due = 0.0
        while True:
            with self._lock:
                if time.monotonic() >= self._until:
                    self._thread = None
                    return
                period = self._period
            states.append(self._sampler.sample())
            now = time.monotonic()
            if now >= due:
                self._send(states)
                states, due = [], now + seconds_to_tick(now=now)
            self._wake.wait(min(period, due - now))
            self._wake.clear()

    def _send(self, states: list[RankState]) -> None:
        kernel, kind = self._session.kernel, message_type(TelemetryEvent)
        content = encode(TelemetryEvent(self._session.config.rank, tuple(states)))
        kernel.session.send(kernel.iopub_socket, kind, content, ident=f"engine.{kernel.engine_id}.{kind}".encode())
