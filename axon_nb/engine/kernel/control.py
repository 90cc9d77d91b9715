"""Request handlers of the control channel, which answer even while the main thread is stuck.

They report status, interrupt cells, and serve the views of a running job, whose code is imported on first use. Plan
requests are passed to the memory planner, which is imported in the background.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from axon_nb.engine.groups.abort import ABORT, stop_at
from axon_nb.engine.groups.recovery import abort, group_status, group_waits
from axon_nb.engine.inspection.sampler import Sampler, Telemetry
from axon_nb.engine.kernel.cell_log import CellLog
from axon_nb.engine.kernel.hooks import ControlHandler
from axon_nb.engine.kernel.interrupts import InterruptHandler
from axon_nb.engine.kernel.stacks import cell_stack, user_threads
from axon_nb.engine.session import current
from axon_nb.errors import UsageError

__all__ = ["control_handlers", "report_plan", "view_handlers"]


def view_handlers(sampler: Sampler, report_waits: ControlHandler) -> dict[str, ControlHandler]:
    """Handlers for `%watch`, `%memory`, `%shards` and the cluster's card, by message type.

    Args:
        sampler: This rank's sampler.
        report_waits: Handler of ``axon_waits``; its reply is part of that of ``axon_job``.
    """

    def report_job(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.inspection.job import job_report

        cursor = {name: int(content.get(name, 0)) for name in ("pid", "position", "span_position", "since_ns")}
        return {**(report_waits({}) or {}), **job_report(sampler.sample(), **cursor)}

    def report_layouts(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.inspection.shards import layout_report

        known, gradients = str(content.get("known", "")), bool(content.get("gradients"))
        try:
            return layout_report(content["names"], gradients=gradients, known=known)
        except UsageError as error:
            return {"refused": str(error)}

    def report_memory(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.inspection.memory import memory_report

        try:
            return memory_report(content["names"])
        except UsageError as error:
            return {"refused": str(error)}

    def answer_plan(content: dict[str, Any]) -> dict[str, Any]:
        known, stages_only = str(content.get("known", "")), bool(content.get("stages"))
        return report_plan(content["names"], what_if=content.get("what_if"), known_key=known, stages_only=stages_only)

    def report_mesh(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.inspection.variables import mesh_fields

        return {"mesh": mesh_fields()}

    frequent = {"axon_job": report_job, "axon_layouts": report_layouts, "axon_memory": report_memory}
    with_cost = {name: _with_cost(handler) for name, handler in frequent.items()}
    return {**with_cost, "axon_mesh": report_mesh, "axon_plan": answer_plan}


def _with_cost(handler: Callable[[dict[str, Any]], dict[str, Any]]) -> ControlHandler:
    """Add ``spent_s`` to a handler's reply: CPU seconds of the thread that answers."""

    def answer(content: dict[str, Any]) -> dict[str, Any]:
        start = time.thread_time()
        reply = handler(content)
        return {**reply, "spent_s": time.thread_time() - start}

    return answer


def control_handlers(
    sampler: Sampler, interrupts: InterruptHandler, telemetry: Telemetry, log: CellLog
) -> dict[str, ControlHandler]:
    """Handlers for the control channel, by message type."""

    def status(content: dict[str, Any]) -> dict[str, Any]:
        return dataclasses.asdict(sampler.sample())

    def watch(content: dict[str, Any]) -> dict[str, Any]:
        telemetry.watch(hz=float(content["hz"]), seconds=float(content["seconds"]))
        return {}

    def abort_cell(content: dict[str, Any]) -> dict[str, Any]:
        # Set the flag first: code that the interrupt wakes must not wait again.
        ABORT.set()
        pending = interrupts.pending
        interrupted = interrupts.interrupt(content.get("run"))
        abort(again=bool(content.get("again")))
        return {"interrupted": interrupted, "pending": pending, "line": sampler.sample().line if pending else None}

    def report_waits(content: dict[str, Any]) -> dict[str, Any]:
        state = sampler.sample()
        report = {"rank": state.rank, "running": state.cell is not None, "line": state.line, "call": state.call}
        report["via"], report["waited"] = sampler.via() if state.call else ("", 0)
        return {**report, **group_waits(), "threads": user_threads()}

    def stacks(content: dict[str, Any]) -> dict[str, Any]:
        return {"state": dataclasses.asdict(sampler.sample()), "frames": cell_stack(current(), interrupts)}

    def report_spans(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.inspection.spans import span_reader

        return span_reader().read(since=int(content["since"]), watch_s=float(content["watch"]))

    def stop(content: dict[str, Any]) -> dict[str, Any]:
        stop_at(int(content["at"]), group=str(content["group"]))
        return {}

    def report_cells(content: dict[str, Any]) -> dict[str, Any]:
        query = {"run": content.get("run"), "since": content.get("since", 0), "after_ns": content.get("after_ns", 0)}
        return {"cells": log.report(**query), "running": interrupts.running, **group_status()}

    return {
        "axon_abort": abort_cell,
        "axon_cells": report_cells,
        "axon_spans": report_spans,
        "axon_stacks": stacks,
        "axon_status": status,
        "axon_stop": stop,
        "axon_waits": report_waits,
        "axon_watch": watch,
        **view_handlers(sampler, report_waits),
    }


def report_plan(
    names: Sequence[str], *, what_if: Mapping[str, Any] | None, known_key: str, stages_only: bool = False
) -> dict[str, Any]:
    """Answer ``axon_plan``: `memory_plan.planner_inputs`, or ``is_pending`` while that is imported, or ``refused``.

    Args:
        names: A model, and optionally its optimizers.
        what_if: Fields of `MemorySetup` to change; None for the current setup.
        known_key: Key of the model that the notebook already has.
        stages_only: For a pipeline: return only this rank's stages.
    """
    from axon_nb.engine.inspection.memory import import_in_background, modules_and_optimizers

    session = current()
    try:
        modules, optimizers = modules_and_optimizers(list(names), session)
        if len(modules) != 1:
            chosen = ", ".join(names) or "the namespace"
            return {"refused": f"A plan needs one model, but {chosen} holds {len(modules)}. Name one: `%memory model`."}
        planner = import_in_background("axon_nb.engine.inspection.memory_plan")
        if planner is None:
            return {"is_pending": True}
        options: dict[str, Any] = {"what_if": what_if, "known_key": known_key, "stages_only": stages_only}
        answer: dict[str, Any] = planner.planner_inputs(modules[0], optimizers, session, **options)
    except (UsageError, ImportError) as error:
        return {"refused": str(error)}
    return answer
