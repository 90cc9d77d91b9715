"""Answers the views of a rank: `%memory`, `%shards`, `%timeline` and the cluster's card. Imported when one asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from axon_nb.engine.inspection.gradients import GradientReader
from axon_nb.engine.inspection.job import with_cost
from axon_nb.engine.inspection.last_call import CallRecorder
from axon_nb.engine.inspection.memory import BackgroundImports, MemoryReader, modules_and_optimizers
from axon_nb.engine.inspection.shards import layout_report
from axon_nb.engine.inspection.spans import SpanReader
from axon_nb.engine.session import RankSession
from axon_nb.errors import UsageError
from axon_nb.records.protocol.contents import (
    LayoutsReply,
    LayoutsRequest,
    MemoryRequest,
    PlanReply,
    PlanRequest,
)
from axon_nb.records.protocol.inspection import SpansReply, SpansRequest


class Views:
    """What views ask of a rank, and what it remembers between two requests.

    Args:
        session: This rank.
    """

    def __init__(self, session: RankSession) -> None:
        self._session = session
        self.gradients = GradientReader(session)
        self._calls = CallRecorder(session)
        self._imports = BackgroundImports()
        self._memory = MemoryReader(session, self.gradients, self._calls, self._imports)
        self._spans = SpanReader(session)
        self._planner: Any = None
        """The memory planner, once its module is imported."""
        self._handlers: dict[type[Any], Callable[[Any], Any]] = {
            LayoutsRequest: with_cost(self._report_layouts),
            MemoryRequest: with_cost(lambda request: self._memory.report(request.names)),
            PlanRequest: self._report_plan,
            SpansRequest: self._report_spans,
        }

    def answer(self, request: Any) -> Any:
        """Answer a request of `VIEW_REQUESTS`."""
        return self._handlers[type(request)](request)

    def _report_layouts(self, request: LayoutsRequest) -> LayoutsReply:
        gradients = self.gradients if request.gradients else None
        space = self._session.kernel.shell.user_ns
        return layout_report(request.names, space, gradients=gradients, known=request.known)

    def _report_spans(self, request: SpansRequest) -> SpansReply:
        return self._spans.read(since=request.since, watch_s=request.watch)

    def _report_plan(self, request: PlanRequest) -> PlanReply:
        """Answer for the memory planner; `is_pending` while that is imported, or `refused`."""
        session, names = self._session, list(request.names)
        try:
            modules, optimizers = modules_and_optimizers(names, session)
            if len(modules) != 1:
                where = ", ".join(names) or "the namespace"
                why = f"A plan needs one model, but {where} holds {len(modules)}. Name one: `%memory model`."
                return PlanReply(refused=why)
            if self._planner is None:
                if (module := self._imports.get("axon_nb.engine.inspection.memory_plan")) is None:
                    return PlanReply(is_pending=True)
                self._planner = module.Planner(session, self._calls)
            reply: PlanReply = self._planner.inputs(
                modules[0], optimizers, what_if=request.what_if, known_key=request.known, stages_only=request.stages
            )
        except (UsageError, ImportError) as error:
            return PlanReply(refused=str(error))
        return reply
