"""Request handlers of the control channel, which answer even while the main thread is stuck.

They report status, interrupt cells, and serve the views of a running job, whose code is imported on first use. Plan
requests are passed to the memory planner, which is imported in the background.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar

from axon_nb.engine.groups.flight_recorder import overdue
from axon_nb.engine.groups.recovery import abort, group_status
from axon_nb.engine.inspection.group_waits import group_waits
from axon_nb.engine.inspection.sampler import Sampler, Telemetry, awaited_peers
from axon_nb.engine.kernel.cell_log import CellLog
from axon_nb.engine.kernel.hooks import ControlHandlers
from axon_nb.engine.kernel.interrupts import InterruptHandler
from axon_nb.engine.kernel.stacks import cell_stack, user_threads
from axon_nb.engine.session import RankSession, current
from axon_nb.errors import UsageError
from axon_nb.host.children import signal_started
from axon_nb.records.protocol.aborts import AbortReply, AbortRequest, StopRequest
from axon_nb.records.protocol.cells import CellsReply, CellsRequest
from axon_nb.records.protocol.contents import (
    LayoutsReply,
    LayoutsRequest,
    MemoryReply,
    MemoryRequest,
    PlanReply,
    PlanRequest,
)
from axon_nb.records.protocol.inspection import (
    JobReply,
    JobRequest,
    MeshReply,
    MeshRequest,
    SpansReply,
    SpansRequest,
    StacksReply,
    StacksRequest,
    StatusRequest,
    WaitsReply,
    WaitsRequest,
    WatchRequest,
)
from axon_nb.records.telemetry import RankState
from axon_nb.records.waits import RankWaits

__all__ = ["control_handlers", "report_plan", "view_handlers"]

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT", JobReply, LayoutsReply, MemoryReply)


def view_handlers(sampler: Sampler, report_waits: Callable[[WaitsRequest], WaitsReply]) -> ControlHandlers:
    """Handlers for `%watch`, `%memory`, `%shards` and the cluster's card.

    Args:
        sampler: This rank's sampler.
        report_waits: Handler of `WaitsRequest`; its reply is part of that of `JobRequest`.
    """

    def report_job(request: JobRequest) -> JobReply:
        from axon_nb.engine.inspection.job import job_report

        return JobReply(job_report(sampler.sample(), request), report_waits(WaitsRequest()).waits)

    def report_layouts(request: LayoutsRequest) -> LayoutsReply:
        from axon_nb.engine.inspection.shards import layout_report

        return layout_report(request.names, gradients=request.gradients, known=request.known)

    def report_memory(request: MemoryRequest) -> MemoryReply:
        from axon_nb.engine.inspection.memory import memory_report

        return memory_report(request.names)

    def report_mesh(request: MeshRequest) -> MeshReply:
        from axon_nb.engine.inspection.variables import own_mesh

        return MeshReply(own_mesh())

    return {
        JobRequest: _with_cost(report_job),
        LayoutsRequest: _with_cost(report_layouts),
        MemoryRequest: _with_cost(report_memory),
        MeshRequest: report_mesh,
        PlanRequest: report_plan,
    }


def _with_cost(handler: Callable[[RequestT], ReplyT]) -> Callable[[RequestT], ReplyT]:
    """Add `spent_s` to a handler's reply: CPU seconds of the thread that answers."""

    def answer(request: RequestT) -> ReplyT:
        start = time.thread_time()
        reply = handler(request)
        return dataclasses.replace(reply, spent_s=time.thread_time() - start)

    return answer


def control_handlers(
    session: RankSession, sampler: Sampler, interrupts: InterruptHandler, telemetry: Telemetry, log: CellLog
) -> ControlHandlers:
    """Handlers for the control channel, by request class."""
    groups = session.groups

    def status(request: StatusRequest) -> RankState:
        return sampler.sample()

    def watch(request: WatchRequest) -> None:
        telemetry.watch(hz=request.hz, seconds=request.seconds)

    def abort_cell(request: AbortRequest) -> AbortReply:
        # Set the flag first: code that the interrupt wakes must not wait again.
        groups.abort.set()
        pending = interrupts.pending
        interrupted = interrupts.interrupt(request.run)
        if interrupted and request.by_user and not request.again:
            signal_started(signal.SIGINT)
        abort(again=request.again)
        return AbortReply(interrupted, pending, sampler.sample().line if pending else None)

    def report_waits(request: WaitsRequest) -> WaitsReply:
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
        native = groups.native
        late = overdue(native) if native is not None and waits.running else ""
        return WaitsReply(waits, in_progress.collectives, awaited_peers(), late)

    def stacks(request: StacksRequest) -> StacksReply:
        return StacksReply(sampler.sample(), tuple(cell_stack(session, interrupts)))

    def report_spans(request: SpansRequest) -> SpansReply:
        from axon_nb.engine.inspection.spans import span_reader

        return span_reader().read(since=request.since, watch_s=request.watch)

    def stop(request: StopRequest) -> None:
        groups.abort.stop_at(request.at, group=request.group)

    def report_cells(request: CellsRequest) -> CellsReply:
        cells = log.report(run=request.run, since=request.since, after_ns=request.after_ns)
        return CellsReply(tuple(cells), interrupts.running, **group_status())

    return {
        AbortRequest: abort_cell,
        CellsRequest: report_cells,
        SpansRequest: report_spans,
        StacksRequest: stacks,
        StatusRequest: status,
        StopRequest: stop,
        WaitsRequest: report_waits,
        WatchRequest: watch,
        **view_handlers(sampler, report_waits),
    }


def report_plan(request: PlanRequest) -> PlanReply:
    """Answer a planner: `memory_plan.planner_inputs`, or `is_pending` while that is imported, or `refused`."""
    from axon_nb.engine.inspection.memory import import_in_background, modules_and_optimizers

    session, names = current(), list(request.names)
    try:
        modules, optimizers = modules_and_optimizers(names, session)
        if len(modules) != 1:
            chosen = ", ".join(names) or "the namespace"
            why = f"A plan needs one model, but {chosen} holds {len(modules)}. Name one: `%memory model`."
            return PlanReply(refused=why)
        planner = import_in_background("axon_nb.engine.inspection.memory_plan")
        if planner is None:
            return PlanReply(is_pending=True)
        options: dict[str, Any] = {
            "what_if": request.what_if,
            "known_key": request.known,
            "stages_only": request.stages,
        }
        reply: PlanReply = planner.planner_inputs(modules[0], optimizers, session, **options)
    except (UsageError, ImportError) as error:
        return PlanReply(refused=str(error))
    return reply
