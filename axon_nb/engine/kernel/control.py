"""Request handlers of the control channel, which answer even while the main thread is stuck.

They report status and stacks, interrupt cells and complete names; `Views` answers what views ask, and is imported when
one does.

The main thread's stack is read from the cell's frame on, from another thread at any time. Files are classified as
library or user code, and threads are found that may still communicate while the main thread waits or after it has
finished the cell.

Completions: a separate thread does the work, and the control thread waits for it only briefly: whatever a completion
runs into (a slow `__dir__`, a device that hangs) must not block an interrupt. The snapshot of names with their
attributes and keys is small enough to be stored in the notebook after each cell.

Before version 9, ipyparallel's engines have no control thread, without which no cell could be interrupted and no view
could ask anything until the cell ends: they get one.
"""

from __future__ import annotations

import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from types import CodeType, ModuleType
from typing import Any, TypeVar

import torch
from IPython.core.completer import IPCompleter

from axon_nb.engine.debugger import Breakpoints
from axon_nb.engine.frames import code_by_thread, gc_paused, is_cell, main_frame
from axon_nb.engine.groups.abort import in_thread
from axon_nb.engine.groups.recovery import abort
from axon_nb.engine.inspection.telemetry import Sampler, Telemetry, TrainingJob, awaited_peers, group_waits, with_cost
from axon_nb.engine.kernel.cells import CellLog
from axon_nb.engine.kernel.hooks import ControlHandlers
from axon_nb.engine.kernel.interrupts import InterruptHandler
from axon_nb.engine.session import RankSession
from axon_nb.engine.sharding import own_mesh
from axon_nb.errors import UsageError
from axon_nb.host.children import signal_started
from axon_nb.records.hooks import hook, missing_hooks
from axon_nb.records.protocol import cells as cell_protocol
from axon_nb.records.protocol import inspection as protocol
from axon_nb.records.stacks import StackFrame, library_of
from axon_nb.records.waits import RankWaits
from axon_nb.shell import RUN_CODE, user_frame

_MAX_FRAMES = 5000
_FIRST_FRAMES, _LAST_FRAMES = 15, 25
"""Entries shown from each end of a deep stack."""
_MAX_WIDTH = 160
Point = tuple[Any, int]
"""(code object, line)"""
_COMMUNICATES = os.path.join("", "torch", "distributed", "")
Reply = TypeVar("Reply")
_BUDGET_S = 0.04
"""After this time, the remaining names are sent without attributes."""
_MAX_NAMES = 1000
_MAX_ATTRIBUTES = 500
_MAX_KEYS = 200
_MAX_KEY = 80
_TIMEOUT_S = 0.08
_TIMED_OUT = "no answer in time"
_MAX_MATCHES = 1000
_MAX_TEXT = 200_000
_POLICY = {
    # IPython may call the `__getattr__` or `__getitem__` of these types for `model.layers[0].`: they only look up.
    # Tensors are excluded: indexing a DTensor communicates.
    "allowed_getattr_external": {("pandas", "DataFrame"), ("pandas", "Series"), ("torch", "nn", "Module")},
    "allowed_getitem_external": {
        ("numpy", "ndarray"),
        ("numpy", "void"),
        ("pandas", "DataFrame"),
        ("pandas", "Series"),
        ("pandas", "core", "indexing", "_LocIndexer"),
        ("pandas", "core", "indexing", "_iLocIndexer"),
        ("torch", "nn", "ModuleDict"),
        ("torch", "nn", "ModuleList"),
        ("torch", "nn", "Sequential"),
    },
}
VIEWS = "axon_nb.engine.inspection.views:Views"
"""A part of the session."""


def cell_stack(session: RankSession, interrupts: InterruptHandler) -> list[StackFrame]:
    """Locations and source lines, outermost first, with library frames folded; empty if no cell runs."""
    if session.cell is None:
        return []
    points = _thread_stack() or list(_await_chain(interrupts.task))
    entries: list[StackFrame] = []
    folded: list[Point] = []
    for code, line in points:
        library = library_of(code.co_filename)
        if library:
            folded.append((code, line))
            continue
        entries += _fold(folded)
        folded = []
        entries.append(_user_entry(session, code, line))
    entries += _fold(folded)
    if len(entries) > _FIRST_FRAMES + _LAST_FRAMES:
        left_out = len(entries) - _FIRST_FRAMES - _LAST_FRAMES
        entries[_FIRST_FRAMES:-_LAST_FRAMES] = [StackFrame(f"… {left_out:,} more user frames …")]
    return entries


def _thread_stack() -> list[Point]:
    frame = main_frame()
    user = user_frame(frame)
    points: list[Point] = []
    while user is not None and frame is not None and len(points) < _MAX_FRAMES:
        points.append((frame.f_code, frame.f_lineno))
        if frame is user:
            break
        frame = frame.f_back
    return points[::-1]


def _await_chain(task: Any) -> Iterator[Point]:
    """The await chain of an async cell, which is not on the thread's stack while it waits."""
    waiting = task.get_coro() if task is not None and not task.done() else None
    inside = False
    for _ in range(_MAX_FRAMES):
        with gc_paused():
            frame = next((f for n in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(waiting, n, None))), None)
        if frame is None:
            return
        if inside:
            yield frame.f_code, frame.f_lineno
        inside = inside or frame.f_code is RUN_CODE
        names = ("cr_await", "gi_yieldfrom", "ag_await")
        waiting = next((w for n in names if (w := getattr(waiting, n, None)) is not None), None)


def _fold(points: list[Point]) -> list[StackFrame]:
    if not points:
        return []
    packages = ", ".join(dict.fromkeys(library_of(code.co_filename) for code, _ in points))
    first, last = points[0][0].co_name, points[-1][0].co_name
    if len(points) == 1:
        return [StackFrame(f"… 1 frame of {packages}: {first}")]
    return [StackFrame(f"… {len(points):,} frames of {packages}: {first} … {last}")]


def _user_entry(session: RankSession, code: Any, line: int) -> StackFrame:
    name_parts = getattr(session.kernel.shell.compile, "format_code_name", lambda name: None)(code.co_filename)
    file = " ".join(name_parts) if name_parts else code.co_filename
    function = "" if is_cell(code) else f", in {code.co_name}"
    source = linecache.getline(code.co_filename, line).strip()
    return StackFrame(f"{file[-_MAX_WIDTH:]}, line {line}{function[:_MAX_WIDTH]}", source[:_MAX_WIDTH])


def user_threads() -> list[str]:
    """Names of threads that currently run user code, communicate, or wait to start (`threading.Timer`).

    Library threads (data loaders, progress bars, log writers) run no user code. An idle thread of a pool gets work only
    from user code, so it counts only while that runs.
    """
    running = code_by_thread()
    return [
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        and not thread.name.startswith("axon_nb")
        and (isinstance(thread, threading.Timer) or any(map(_may_communicate, running.get(thread.ident or 0, ()))))
    ]


def _may_communicate(code: CodeType) -> bool:
    return not library_of(code.co_filename) or _COMMUNICATES in code.co_filename


def names_snapshot(shell: Any, *, known: set[str]) -> cell_protocol.NamesReply:
    """Snapshot for completion without another request.

    Args:
        shell: The rank's IPython shell.
        known: Names of types whose attributes the caller already has.
    """
    end = time.monotonic() + _BUDGET_S
    names: dict[str, cell_protocol.KnownName] = {}
    types: dict[str, tuple[str, ...]] = {}
    for name, value in list(shell.user_ns.items())[-_MAX_NAMES:]:
        if name.startswith("_"):
            continue
        names[name] = cell_protocol.KnownName()
        if time.monotonic() > end:
            continue
        try:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            if kind not in known and kind not in types:
                types[kind] = tuple(attribute for attribute in dir(type(value)) if not attribute.startswith("__"))
            names[name] = cell_protocol.KnownName(kind, tuple(_instance_attributes(value)), tuple(_keys(value)))
        except Exception:  # an unusual object: its name is enough
            continue
    return cell_protocol.NamesReply(names, types)


def _instance_attributes(value: Any) -> list[str]:
    names: list[Any] = []
    if isinstance(value, ModuleType):
        names = dir(value)
    else:
        names += getattr(value, "__dict__", ())
    if isinstance(value, torch.nn.Module):
        names += [name for part in (value._modules, value._parameters, value._buffers) for name in part]
    elif _is_data_frame(value):
        names += _simple_keys(value.columns, identifiers=True)
    return [name for name in names if isinstance(name, str) and not name.startswith("__")][:_MAX_ATTRIBUTES]


def _keys(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [repr(key) for key in _simple_keys(value)]
    return [repr(key) for key in _simple_keys(value.columns)] if _is_data_frame(value) else []


def _is_data_frame(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.DataFrame)


def _simple_keys(keys: Iterable[Any], *, identifiers: bool = False) -> list[str | int]:
    simple = [key for key, _ in zip(list(keys), range(_MAX_KEYS), strict=False) if type(key) in (str, int)]
    return [
        key
        for key in simple
        if len(str(key)) <= _MAX_KEY and (not identifiers or (isinstance(key, str) and key.isidentifier()))
    ]


class CompletionService:
    """Answers completion requests on one rank, one at a time.

    Args:
        shell: The rank's IPython shell.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._completer: Any = None
        self._running: Future[Any] | None = None

    def handlers(self) -> ControlHandlers:
        """Handlers for the control channel, by request class."""
        return {
            cell_protocol.CompleteRequest: self._complete,
            cell_protocol.InspectRequest: self._inspect,
            cell_protocol.NamesRequest: self._names,
        }

    def _complete(self, request: cell_protocol.CompleteRequest) -> cell_protocol.CompleteReply:
        def work() -> cell_protocol.CompleteReply:
            fragment, matches = self._own_completer().complete(line_buffer=request.line, cursor_pos=request.cursor)
            return cell_protocol.CompleteReply(fragment, tuple(matches)[:_MAX_MATCHES])

        return self._run_with_timeout(work)

    def _inspect(self, request: cell_protocol.InspectRequest) -> cell_protocol.InspectReply:
        def work() -> cell_protocol.InspectReply:
            try:
                # IPython 7 has no `omit_sections`; what asks for them came later, too.
                omitted = {"omit_sections": request.omit} if request.omit else {}
                bundle = self._shell.object_inspect_mime(request.name, detail_level=request.detail, **omitted)
            except KeyError:
                return cell_protocol.InspectReply(False, {})
            if not self._shell.enable_html_pager:
                bundle.pop("text/html", None)
            return cell_protocol.InspectReply(True, {mime: text[:_MAX_TEXT] for mime, text in bundle.items()})

        return self._run_with_timeout(work)

    def _names(self, request: cell_protocol.NamesRequest) -> cell_protocol.NamesReply:
        return self._run_with_timeout(lambda: names_snapshot(self._shell, known=set(request.known)))

    def _own_completer(self) -> Any:
        if self._completer is None:
            shell = self._shell
            # Without jedi, which takes seconds to start and knows no more about live objects.
            self._completer = IPCompleter(
                shell=shell,
                namespace=shell.user_ns,
                global_namespace=shell.user_global_ns,
                parent=shell,
                use_jedi=False,
                policy_overrides=_POLICY,
            )
            self._completer.custom_completers = shell.Completer.custom_completers
        return self._completer

    def _run_with_timeout(self, work: Callable[[], Reply]) -> Reply:
        """Run `work` and return its result; refuse if it takes too long or the previous request has not finished.

        Raises:
            UsageError: it is refused.
        """
        if self._running is not None and not self._running.done():
            raise UsageError(_TIMED_OUT)
        self._running = running = in_thread(work, "axon_nb-completion")
        if not wait([running], _TIMEOUT_S).done:
            raise UsageError(_TIMED_OUT)
        self._running = None  # an error would keep its frames alive
        if (error := running.exception()) is not None:
            raise UsageError(type(error).__name__)
        return running.result()


def control_handlers(
    session: RankSession,
    job: TrainingJob,
    interrupts: InterruptHandler,
    telemetry: Telemetry,
    log: CellLog,
    *,
    breakpoints: Breakpoints,
) -> ControlHandlers:
    """Handlers for the control channel, by request class."""
    groups, sampler = session.groups, telemetry.sampler

    def abort_cell(request: cell_protocol.AbortRequest) -> cell_protocol.AbortReply:
        # Set the flag first: code that the interrupt wakes must not wait again.
        groups.abort.set()
        pending = interrupts.pending
        interrupted = interrupts.interrupt(request.run)
        if interrupted:
            breakpoints.release()
        if interrupted and request.by_user and not request.again:
            signal_started(signal.SIGINT)
        abort(again=request.again)
        return cell_protocol.AbortReply(interrupted, pending, sampler.sample().line if pending else None)

    def report_cells(request: cell_protocol.CellsRequest) -> cell_protocol.CellsReply:
        cells = log.report(run=request.run, since=request.since, after_ns=request.after_ns)
        return cell_protocol.CellsReply(
            cells=tuple(cells),
            running=interrupts.running,
            epoch=groups.epoch,
            aborted=groups.abort.is_set(),
            rebuilding=groups.rebuilding,
            resized_from=session.resized_from,
            staged_size=session.staged_size,
        )

    def report_job(request: protocol.JobRequest) -> protocol.JobReply:
        report = job.report(sampler.sample(), request)
        return protocol.JobReply(report, _waits(session, sampler).waits)

    return {
        cell_protocol.AbortRequest: abort_cell,
        cell_protocol.CellsRequest: report_cells,
        protocol.DebuggerLine: breakpoints.put,
        protocol.NumbersRequest: lambda request: session.numbers.report(request),  # noqa: PLW0108 - made on first use
        protocol.StacksRequest: lambda _: protocol.StacksReply(
            sampler.sample(), tuple(cell_stack(session, interrupts))
        ),
        protocol.StatusRequest: lambda _: sampler.sample(),
        cell_protocol.StopRequest: lambda request: groups.abort.stop_at(request.at, group=request.group),
        protocol.WaitsRequest: lambda _: _waits(session, sampler),
        protocol.WatchRequest: lambda request: telemetry.watch(hz=request.hz, seconds=request.seconds),
        protocol.JobRequest: with_cost(report_job),
        protocol.MeshRequest: lambda _: protocol.MeshReply(own_mesh(session.kernel.shell.user_ns)),
        **dict.fromkeys(
            (protocol.LayoutsRequest, protocol.MemoryRequest, protocol.PlanRequest, protocol.SpansRequest),
            lambda request: session.part(VIEWS).answer(request),
        ),
    }


def _waits(session: RankSession, sampler: Sampler) -> protocol.WaitsReply:
    """What this rank does, and what it waits for."""
    state, in_progress = sampler.sample(), group_waits()
    via, waited = sampler.via(state.call) if state.call else ("", 0)
    waits = RankWaits(
        rank=state.rank,
        running=state.cell is not None,
        line=state.line,
        call=in_progress.call or state.call,
        pending=in_progress.pending,
        counts=in_progress.counts,
        via=via,
        waited=waited,
        threads=tuple(user_threads()),
        within=sampler.within() if state.line else "",
    )
    late = ""
    if session.groups.native is not None and waits.running:
        from axon_nb.engine.groups.flight_recorder import dump, overdue

        late = overdue(session.groups.native, dump())
    return protocol.WaitsReply(waits, in_progress.collectives, awaited_peers(), late, in_progress.started)


def install_control_thread() -> None:
    """Have the engine that this process is about to run use a kernel with a control thread."""
    if not hook("kernel.control_thread").is_used or missing_hooks("kernel.control_thread"):
        return
    import ipyparallel.engine.app
    from ipykernel.control import ControlThread
    from ipyparallel.engine.kernel import IPythonParallelKernel
    from zmq.eventloop.zmqstream import ZMQStream

    class ThreadedKernel(IPythonParallelKernel):
        control_stream: Any
        control_thread: Any

        def start(self) -> None:
            stream = self.control_stream
            self.control_thread = ControlThread(daemon=True)
            self.control_thread.start()
            socket, stream.socket = stream.socket, None
            stream.io_loop.remove_handler(socket)
            self.control_stream = ZMQStream(socket, self.control_thread.io_loop)
            super().start()

    engine: Any = ipyparallel.engine.app
    engine.Kernel = ThreadedKernel
