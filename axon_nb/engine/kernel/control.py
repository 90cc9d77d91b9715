"""Request handlers of the control channel, which answer even while the main thread is stuck.

They report status and interrupt cells; `Views` answers what views ask, and is imported when one does.
"""

from __future__ import annotations

import functools
import signal
from typing import Any

from axon_nb.engine.debugger.breakpoints import Breakpoints
from axon_nb.engine.groups.recovery import abort
from axon_nb.engine.inspection.group_waits import group_waits
from axon_nb.engine.inspection.job import TrainingJob, with_cost
from axon_nb.engine.inspection.sampler import Sampler, Telemetry, awaited_peers
from axon_nb.engine.kernel.cell_log import CellLog
from axon_nb.engine.kernel.hooks import ControlHandlers
from axon_nb.engine.kernel.interrupts import InterruptHandler
from axon_nb.engine.kernel.stacks import cell_stack, user_threads
from axon_nb.engine.session import RankSession
from axon_nb.engine.sharding.sharded import own_mesh
from axon_nb.host.children import signal_started
from axon_nb.records.protocol.aborts import AbortReply, AbortRequest, StopRequest
from axon_nb.records.protocol.cells import CellsReply, CellsRequest
from axon_nb.records.protocol.contents import LayoutsRequest, MemoryRequest, NumbersReply, NumbersRequest, PlanRequest
from axon_nb.records.protocol.inspection import (
    DebuggerLine,
    JobReply,
    JobRequest,
    MeshReply,
    MeshRequest,
    SpansRequest,
    StacksReply,
    StacksRequest,
    StatusRequest,
    WaitsReply,
    WaitsRequest,
    WatchRequest,
)
from axon_nb.records.telemetry import RankState
from axon_nb.records.waits.calls import RankWaits

VIEWS = "axon_nb.engine.inspection.views:Views"
"""A part of the session."""


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

    def status(request: StatusRequest) -> RankState:
        return sampler.sample()

    def watch(request: WatchRequest) -> None:
        telemetry.watch(hz=request.hz, seconds=request.seconds)

    def abort_cell(request: AbortRequest) -> AbortReply:
        # Set the flag first: code that the interrupt wakes must not wait again.
        groups.abort.set()
        pending = interrupts.pending
        interrupted = interrupts.interrupt(request.run)
        if interrupted:
            breakpoints.release()
        if interrupted and request.by_user and not request.again:
            signal_started(signal.SIGINT)
        abort(again=request.again)
        return AbortReply(interrupted, pending, sampler.sample().line if pending else None)

    def report_waits(request: WaitsRequest) -> WaitsReply:
        return _waits(session, sampler)

    def numbers(request: NumbersRequest) -> NumbersReply:
        return session.numbers.report(request)

    def stacks(request: StacksRequest) -> StacksReply:
        return StacksReply(sampler.sample(), tuple(cell_stack(session, interrupts)))

    def stop(request: StopRequest) -> None:
        groups.abort.stop_at(request.at, group=request.group)

    def report_cells(request: CellsRequest) -> CellsReply:
        cells = log.report(run=request.run, since=request.since, after_ns=request.after_ns)
        return CellsReply(
            cells=tuple(cells),
            running=interrupts.running,
            epoch=groups.epoch,
            aborted=groups.abort.is_set(),
            rebuilding=groups.rebuilding,
            resized_from=session.resized_from,
            staged_size=session.staged_size,
        )

    def report_job(request: JobRequest) -> JobReply:
        report = job.report(sampler.sample(), request)
        return JobReply(report, report_waits(WaitsRequest()).waits)

    return {
        AbortRequest: abort_cell,
        CellsRequest: report_cells,
        DebuggerLine: breakpoints.put,
        NumbersRequest: numbers,
        StacksRequest: stacks,
        StatusRequest: status,
        StopRequest: stop,
        WaitsRequest: report_waits,
        WatchRequest: watch,
        JobRequest: with_cost(report_job),
        MeshRequest: lambda _: MeshReply(own_mesh(session.kernel.shell.user_ns)),
        **dict.fromkeys((LayoutsRequest, MemoryRequest, PlanRequest, SpansRequest), functools.partial(_view, session)),
    }


def _waits(session: RankSession, sampler: Sampler) -> WaitsReply:
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
    return WaitsReply(waits, in_progress.collectives, awaited_peers(), late, in_progress.started)


def _view(session: RankSession, request: Any) -> Any:
    return session.part(VIEWS).answer(request)
