"""Samples what this rank's main thread does, read from its stack by another thread.

While the notebook watches, samples are sent to it, batched per tick: a message costs this rank, the controller and the
notebook ten times as much as a sample.
"""

from __future__ import annotations

import os
import threading
import time
from types import FrameType

import torch

from axon_nb.engine.collective_names import find_implicit_collective, is_public_call
from axon_nb.engine.frames import main_frame
from axon_nb.engine.groups.install import all_groups
from axon_nb.engine.groups.state import current_groups
from axon_nb.engine.session import RankSession, current
from axon_nb.records.protocol.inspection import TelemetryEvent
from axon_nb.records.protocol.messages import message_type
from axon_nb.records.protocol.wire import encode
from axon_nb.records.telemetry import Activity, RankState, seconds_to_tick
from axon_nb.records.waits.functions import PUBLIC_NAMES
from axon_nb.records.waits.silent_ranks import PeerCall
from axon_nb.shell.user_frame import inner_function, user_frame

_WAITING_THRESHOLD_NS = 250_000_000
_IN_BACKWARD = " (backward)"
_open = open  # a cell may replace the builtin
_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_MAX_HZ = 20.0


def awaited_peers() -> tuple[PeerCall, ...]:
    """Report what shared memory shows of the ranks that this rank waits for."""
    groups = {group.group_name: group for group in all_groups()}
    peers = {}
    for call in current_groups().calls.pending():
        group = groups.get(call.group)
        if group is None or group.memory is None or not call.waiting_thread:
            continue
        progress = group.memory.progress
        for peer in progress.behind() if call.sequence else [call.peer]:
            if peer >= 0:
                seen = PeerCall(progress.members[peer], *progress.last_call(peer), progress.is_stopped(peer))
                peers[seen.rank] = seen
    return tuple(peers.values())


class Sampler:
    """Takes samples, and remembers when the current call started."""

    def __init__(self, session: RankSession) -> None:
        self._session = session
        self._key: tuple[object, ...] = ()
        self._since_ns = 0

    def sample(self) -> RankState:
        """Take one sample; about 20 us."""
        session, now = self._session, time.monotonic_ns()
        cell = session.cell
        frame = main_frame() if cell is not None else None
        line, call, call_id = self._locate(frame) if cell is not None else (None, "", 0)
        wait = session.groups.calls.current_wait(threading.main_thread().ident or 0) if cell is not None else None
        if wait is not None and not call:
            # DTensor and functional collectives wait without a torch.distributed function on the stack.
            call = PUBLIC_NAMES.get(wait.name, wait.name)
        key = (cell, call, wait.number if wait else call_id)
        if key != self._key:
            self._key, self._since_ns = key, wait.started_ns if wait else now
        if cell is None:
            state = Activity.IDLE
        elif session.is_paused:
            state, call = Activity.PAUSED, ""
        elif not call:
            state = Activity.RUNNING
        else:
            state = Activity.WAITING if now - self._since_ns > _WAITING_THRESHOLD_NS else Activity.COLLECTIVE
        return RankState(
            rank=session.config.rank,
            activity=state,
            time_ns=now,
            cell=cell,
            line=line,
            call=call,
            since_ns=self._since_ns,
            rss_bytes=resident_bytes(),
            device_bytes=_device_bytes(session.device),
            protected=session.protected_step,
        )

    def via(self, call: str) -> tuple[str, int]:
        """The implicit collective on the stack, if any, and the number of the call being waited for.

        Args:
            call: The call of the last sample.
        """
        frame, wait = main_frame(), self._session.groups.calls.current_wait(threading.main_thread().ident or 0)
        name = find_implicit_collective(frame, user_frame(frame))
        if not name and call.endswith(_IN_BACKWARD):
            name = "the backward pass of a DDP model"
        return name, wait.number if wait else 0

    def within(self) -> str:
        """Describe the innermost function of the user; empty if that is the cell itself."""
        frame = main_frame()
        return inner_function(frame, user_frame(frame))

    def _locate(self, frame: FrameType | None) -> tuple[int | None, str, int]:
        """(cell line, communication call, identity of that call's frame)."""
        user = user_frame(frame)
        call, call_id = "", 0
        pending = self._session.groups.calls.pending()
        while frame is not None and frame is not user:
            code = frame.f_code
            if is_public_call(code):
                call, call_id = code.co_name, id(frame)  # the outermost counts: the user called it
            elif pending and not call and code.co_name == "_engine_run_backward" and _is_sleeping():
                # DDP waits for its reductions in C++, at the end of backward.
                call = PUBLIC_NAMES.get(pending[0].name, pending[0].name) + _IN_BACKWARD
                call_id = pending[0].number
            frame = frame.f_back
        return (user.f_lineno if user else None), call, call_id


def _is_sleeping() -> bool:
    """Whether the main thread is off the CPU right now."""
    try:
        with _open(f"/proc/self/task/{threading.main_thread().native_id}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"R"
    except OSError:
        return True


def resident_bytes() -> int:
    """Resident memory of this process in bytes; 0 if unknown."""
    try:
        with _open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_SIZE
    except OSError:
        return 0


def take_peak() -> int:
    """Return the most memory used since the last call, in bytes, and start counting again."""
    if torch.cuda.is_initialized():
        device = current().device
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return int(peak)
    try:
        with _open("/proc/self/status") as status, _open("/proc/self/clear_refs", "w") as reset:
            line = next(line for line in status if line.startswith("VmHWM:"))
            reset.write("5")
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return resident_bytes()


def _device_bytes(device: torch.device) -> int:
    # A query before the first allocation would initialise CUDA on a rank that may never use it.
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_allocated(device))


class Telemetry:
    """Sends samples from a thread while the notebook watches; each watch has a time limit that the watcher renews."""

    def __init__(self, session: RankSession, sampler: Sampler) -> None:
        self._session = session
        self.sampler = sampler
        self._lock = threading.Lock()
        self._until = 0.0
        self._period = 0.1
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()

    def watch(self, *, hz: float, seconds: float) -> None:
        """Sample at `hz` for the next `seconds`; zero seconds stops the watch."""
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
            states.append(self.sampler.sample())
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
