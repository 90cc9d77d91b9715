"""What a rank answers at any time, even while its main thread is stuck: status, interrupt, watch.

What a rank answers to the views of a running job, and what that costs; their code is loaded on first use.

A question for a plan of memory on its way to the model that it is about; the planner is loaded on first use.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, TypeVar

from axon_nb.engine.groups.abort import ABORT, stop_at
from axon_nb.engine.groups.recovery import abort, condition, waits
from axon_nb.engine.inspection.sampler import Sampler, Telemetry
from axon_nb.engine.kernel.cell_log import CellLog
from axon_nb.engine.kernel.hooks import ControlHandlers
from axon_nb.engine.kernel.interrupts import Interrupts
from axon_nb.engine.kernel.stacks import cell_stack, users_threads
from axon_nb.engine.session import current
from axon_nb.errors import UsageError
from axon_nb.records.protocol.cells import AbortReply, AbortRequest, CellsReply, CellsRequest, StopRequest
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

__all__ = ["control_handlers", "plan_report", "view_handlers"]

Asked = TypeVar("Asked")
Told = TypeVar("Told", JobReply, LayoutsReply, MemoryReply)


def view_handlers(sampler: Sampler, tell_waits: Callable[[WaitsRequest], WaitsReply]) -> ControlHandlers:
    """The requests of `%watch`, `%memory`, `%shards` and the cluster's card.

    Args:
        sampler: Of this rank.
        tell_waits: The handler of `WaitsRequest`, whose answer is part of that to `JobRequest`.
    """

    def tell_job(asked: JobRequest) -> JobReply:
        from axon_nb.engine.inspection.job import job_report

        return JobReply(job_report(sampler.sample(), asked), tell_waits(WaitsRequest()).waits)

    def tell_layouts(asked: LayoutsRequest) -> LayoutsReply:
        from axon_nb.engine.inspection.shards import layout_report

        return layout_report(asked.names, gradients=asked.gradients, known=asked.known)

    def tell_memory(asked: MemoryRequest) -> MemoryReply:
        from axon_nb.engine.inspection.memory import memory_report

        return memory_report(asked.names)

    def tell_mesh(asked: MeshRequest) -> MeshReply:
        from axon_nb.engine.inspection.variables import own_mesh

        return MeshReply(own_mesh())

    return {
        JobRequest: _priced(tell_job),
        LayoutsRequest: _priced(tell_layouts),
        MemoryRequest: _priced(tell_memory),
        MeshRequest: tell_mesh,
        PlanRequest: plan_report,
    }


def _priced(handler: Callable[[Asked], Told]) -> Callable[[Asked], Told]:
    """The handler, whose answer also says what it cost: seconds of CPU of the thread that answers."""

    def answer(asked: Asked) -> Told:
        began = time.thread_time()
        told = handler(asked)
        return dataclasses.replace(told, spent_s=time.thread_time() - began)

    return answer


def control_handlers(sampler: Sampler, interrupts: Interrupts, telemetry: Telemetry, log: CellLog) -> ControlHandlers:
    """The requests of the control channel, by their kind."""

    def status(asked: StatusRequest) -> RankState:
        return sampler.sample()

    def watch(asked: WatchRequest) -> None:
        telemetry.watch(hz=asked.hz, seconds=asked.seconds)

    def abort_cell(asked: AbortRequest) -> AbortReply:
        # The flag first: what the interrupt wakes must not begin to wait again.
        ABORT.set()
        unheard = interrupts.unheard
        interrupted = interrupts.interrupt(asked.run)
        abort(again=asked.again)
        return AbortReply(interrupted, unheard, sampler.sample().line if unheard else None)

    def tell_waits(asked: WaitsRequest) -> WaitsReply:
        state, seen = sampler.sample(), waits()
        via, waited = sampler.via() if state.call else ("", 0)
        own = RankWaits(
            rank=state.rank,
            running=state.cell is not None,
            line=state.line,
            call=seen.call or state.call,
            pending=seen.pending,
            counts=seen.counts,
            via=via,
            waited=waited,
            threads=tuple(users_threads()),
        )
        return WaitsReply(own, seen.collectives)

    def stacks(asked: StacksRequest) -> StacksReply:
        return StacksReply(sampler.sample(), tuple(cell_stack(current(), interrupts)))

    def tell_spans(asked: SpansRequest) -> SpansReply:
        from axon_nb.engine.inspection.spans import span_reader

        return span_reader().read(since=asked.since, watch_s=asked.watch)

    def stop(asked: StopRequest) -> None:
        stop_at(asked.at, group=asked.group)

    def tell_cells(asked: CellsRequest) -> CellsReply:
        cells = log.report(run=asked.run, since=asked.since, after_ns=asked.after_ns)
        return CellsReply(tuple(cells), interrupts.running, **condition())

    return {
        AbortRequest: abort_cell,
        CellsRequest: tell_cells,
        SpansRequest: tell_spans,
        StacksRequest: stacks,
        StatusRequest: status,
        StopRequest: stop,
        WaitsRequest: tell_waits,
        WatchRequest: watch,
        **view_handlers(sampler, tell_waits),
    }


def plan_report(asked: PlanRequest) -> PlanReply:
    """The answer to a planner: of `memory_plan.tell_plan`, ``is_pending`` while that is loaded, or ``refused``."""
    from axon_nb.engine.inspection.memory import loaded, modules_and_optimizers

    session, names = current(), list(asked.names)
    try:
        modules, optimizers = modules_and_optimizers(names, session)
        if len(modules) != 1:
            why = f"A plan is of one model, and {', '.join(names)} has {len(modules)}: `%memory model`."
            return PlanReply(refused=why)
        planner = loaded("axon_nb.engine.inspection.memory_plan")
        if planner is None:
            return PlanReply(is_pending=True)
        options: dict[str, Any] = {"asked": asked.asked, "known": asked.known, "stages": asked.stages}
        answer: PlanReply = planner.tell_plan(modules[0], optimizers, session, **options)
    except (UsageError, ImportError) as error:
        return PlanReply(refused=str(error))
    return answer
