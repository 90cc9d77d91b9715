"""What this rank reports while a cell runs: what its main thread does, calls in progress, memory, training progress.

Other threads answer, even while the main thread is busy or stuck: its stack is read from outside. While the notebook
watches, samples are sent to it, batched per tick: a message costs this rank, the controller and the notebook ten times
as much as a sample.

Training progress: logged metrics, progress bars, step rates and time spent communicating. A training step steps each
optimizer once, however many there are. Private hooks: tqdm's set of open bars and its `close`, to read bars of plain
tqdm when a view asks. If they are missing, `%watch` does not show these bars; the cell's output still does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from axon_nb.engine.frames import find_implicit_collective, is_public_call, main_frame
from axon_nb.engine.groups.creation import all_groups, rebuildable_groups
from axon_nb.engine.groups.state import current_groups
from axon_nb.engine.session import RankSession, current
from axon_nb.records.hooks import missing_hooks
from axon_nb.records.protocol.inspection import JobReply, JobRequest, LayoutsReply, MemoryReply, TelemetryEvent
from axon_nb.records.protocol.wire import encode, message_type, pack
from axon_nb.records.spans import covered_ns, ring
from axon_nb.records.telemetry import Activity, RankState, running_cell, seconds_to_tick
from axon_nb.records.training.job import Bar, JobReport, MetricRow, RateMeter, bars, metrics
from axon_nb.records.waits import PUBLIC_NAMES, GroupWaits, PeerCall, PendingCall
from axon_nb.shell import inner_function, user_frame

_WAITING_THRESHOLD_NS = 250_000_000
_IN_BACKWARD = " (backward)"
_open = open  # a cell may replace the builtin
_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_MAX_HZ = 20.0
_MAX_CLOSED = 16
_MAX_ROWS = 2000
_MAX_SPANS = 16384
_MIN_WINDOW_NS = 50_000_000
_COMMUNICATION = ("collective", "p2p")
RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT", JobReply, LayoutsReply, MemoryReply)


def group_waits() -> GroupWaits:
    """Report the calls in progress on this rank, and how many collectives it started: by group, and in the cell."""
    state, groups = current_groups(), {group.group_name: group for group in all_groups()}
    pending = []
    for call in state.calls.pending():
        group = groups.get(call.group)
        if group is None:
            continue
        members = dist.get_process_group_ranks(group)
        pending.append(
            PendingCall(
                number=call.number,
                name=call.name,
                group=call.group,
                ranks=tuple(members),
                sequence=call.sequence,
                peer=members[call.peer] if 0 <= call.peer < len(members) else -1,
                bytes=call.bytes,
                seconds=(time.monotonic_ns() - call.started_ns) / 1e9,
            )
        )
    native = state.native
    created = {_creation(str(group.group_name)): 1 for group in rebuildable_groups()}
    counts = {name: group.sequence for name, group in groups.items()} | created | state.joined
    if (creating := state.creating) is not None:
        name, members, since_ns = creating
        counts[_creation(name)] = 1
        seconds = (time.monotonic_ns() - since_ns) / 1e9
        creation = PendingCall(since_ns, "new_group", _creation(name), tuple(members), 1, -1, 0, seconds)
        pending.insert(0, creation)
    if (joining := state.joining) is not None:
        function, ranks, since_ns = joining
        counts[function] = state.joined[function]
        seconds = (time.monotonic_ns() - since_ns) / 1e9
        pending.insert(0, PendingCall(since_ns, function, function, ranks, counts[function], -1, 0, seconds))
    if native is not None:
        from axon_nb.engine.groups.flight_recorder import native_waits

        return native_waits(native, pending, counts)
    return GroupWaits(tuple(pending), counts, state.calls.num_collectives)


def _creation(name: str) -> str:
    """Return the name under which the creation of a group counts as a collective of its ranks."""
    return f"new_group {name}"


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
        content = pack(encode(TelemetryEvent(self._session.config.rank, tuple(states))))
        kernel.session.send(kernel.iopub_socket, kind, content, ident=f"engine.{kernel.engine_id}.{kind}".encode())


def with_cost(handler: Callable[[RequestT], ReplyT]) -> Callable[[RequestT], ReplyT]:
    """Add `spent_s` to a handler's reply: CPU seconds of the thread that answers."""

    def answer(request: RequestT) -> ReplyT:
        start = time.thread_time()
        reply = handler(request)
        return msgspec.structs.replace(reply, spent_s=time.thread_time() - start)

    return answer


class TqdmBars:
    """Reads the bars of plain tqdm, from the first request on."""

    def __init__(self) -> None:
        self._closed: deque[tuple[int, Bar]] = deque(maxlen=_MAX_CLOSED)
        self._hooked: type | None = None

    def read(self) -> list[Bar]:
        """Return the open bars, and those closed during this cell since the first call."""
        tqdm_class: Any = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
        if tqdm_class is None or missing_hooks("job.tqdm_bars"):
            return []
        if tqdm_class is not self._hooked:
            self._hooked = tqdm_class
            self._install_close_hook(tqdm_class)
        cell = running_cell()
        closed = list(self._closed)
        last = cell or (closed[-1][0] if closed else 0)
        bars = {(bar.depth, bar.desc): bar for number, bar in closed if number == last}
        for bar in sorted(_open_bars(tqdm_class), key=lambda bar: getattr(bar, "start_t", 0.0)):
            state = _bar_state(bar, is_over=False)
            bars[state.depth, state.desc] = state
        return [bars[key] for key in sorted(bars)]

    def _install_close_hook(self, tqdm_class: Any) -> None:
        """Record the final state of bars when they are closed."""
        close, closed = tqdm_class.close, self._closed

        def close_and_record(self: Any) -> Any:
            if not self.disable and hasattr(self, "start_t"):
                closed.append((running_cell(), _bar_state(self, is_over=True)))
            return close(self)

        close_and_record.__doc__ = close.__doc__
        tqdm_class.close = close_and_record


def _open_bars(tqdm_class: Any) -> list[Any]:
    for _ in range(3):
        try:
            return [bar for bar in tqdm_class._instances if not bar.disable and hasattr(bar, "start_t")]
        except RuntimeError:  # the main thread opened or closed a bar meanwhile
            continue
    return []


def _bar_state(bar: Any, *, is_over: bool) -> Bar:
    total = None if bar.total is None else int(bar.total)
    seconds = max(0.0, time.time() - bar.start_t)
    depth = abs(int(getattr(bar, "pos", 0) or 0))
    return Bar((bar.desc or "").rstrip(": "), depth, int(bar.n), total, seconds, is_over, str(bar.unit))


class TrainingJob:
    """The training progress of a rank."""

    def __init__(self, session: RankSession) -> None:
        self._session = session
        self.steps = RateMeter()
        """Rate of training steps, counted from the steps of all optimizers."""
        self._stepped: set[int] = set()
        """Optimizers that have stepped in the current training step, by `id`."""
        self._tqdm_bars = TqdmBars()

    def count_steps(self) -> RemovableHandle:
        """Count training steps until the handle is removed."""
        return register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        # A training step steps each optimizer once: ZeroRedundancyOptimizer steps another within its own step.
        if not self._stepped or id(optimizer) in self._stepped:
            self._stepped.clear()
            self.steps.mark(time.monotonic_ns())
        self._stepped.add(id(optimizer))

    def report(self, state: RankState, request: JobRequest) -> JobReport:
        """Report the job's progress.

        Args:
            state: A current sample.
            request: Where to continue reading. If it refers to another process (the rank was replaced), reading
                restarts at the beginning.
        """
        if request.pid != os.getpid():
            request = JobRequest()
        rows, position, lost = metrics.read(request.position, _MAX_ROWS)
        meter = metrics.pace if metrics.pace.steps else self.steps
        rates = meter.rates(state.time_ns, cell=state.cell)
        logged = rates if meter is metrics.pace else metrics.pace.rates(state.time_ns, cell=state.cell)
        share, span_position = self._communication_share(state.time_ns, request.span_position, request.since_ns)
        return JobReport(
            rank=state.rank,
            pid=os.getpid(),
            state=state,
            rows=tuple(MetricRow(row.shown_step, row.shown_run, row.is_first, row.values) for row in rows),
            position=position,
            lost=lost,
            is_last=len(rows) < _MAX_ROWS,
            steps=meter.steps,
            steps_per_s=rates.steps_per_s,
            items_per_s=logged.items_per_s,
            span_position=span_position,
            communication=share,
            bars=(*bars(), *self._tqdm_bars.read()),
        )

    def _communication_share(self, now: int, span_position: int, since_ns: int) -> tuple[float | None, int]:
        spans, span_position, lost = ring.since(span_position, _MAX_SPANS)
        known = self._session.config.backend != "nccl"  # NCCL's spans are read only for a timeline
        if not known or not since_ns or now - since_ns < _MIN_WINDOW_NS or lost:
            return None, span_position
        intervals = [(span.start_ns, span.end_ns) for span in spans if span.kind in _COMMUNICATION]
        intervals += [(call.started_ns, now) for call in self._session.groups.calls.pending()]
        return covered_ns(intervals, since_ns, now) / (now - since_ns), span_position
