"""What a rank answers at any time, even while its main thread is stuck: status, interrupt, watch.

What a rank answers to the views of a running job, and what that costs; their code is import_in_background on first use.

A question for a plan of memory on its way to the model that it is about; the planner is import_in_background on first use.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from axon_nb.engine.groups.abort import ABORT, stop_at
from axon_nb.engine.groups.recovery import abort, condition, waits
from axon_nb.engine.inspection.sampler import Sampler, Telemetry
from axon_nb.engine.kernel.cell_log import CellLog
from axon_nb.engine.kernel.hooks import ControlHandler
from axon_nb.engine.kernel.interrupts import InterruptHandler
from axon_nb.engine.kernel.stacks import cell_stack, user_threads
from axon_nb.engine.session import current
from axon_nb.errors import UsageError

__all__ = ["control_handlers", "report_plan", "view_handlers"]


def view_handlers(sampler: Sampler, tell_waits: ControlHandler) -> dict[str, ControlHandler]:
    """The requests of `%watch`, `%memory`, `%shards` and the cluster's card, by message type.

    Args:
        sampler: Of this rank.
        tell_waits: The handler of ``axon_waits``, whose answer is part of that to ``axon_job``.
    """

    def tell_job(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.inspection.job import job_report

        asked = {name: int(content.get(name, 0)) for name in ("pid", "position", "span_position", "since_ns")}
        return {**(tell_waits({}) or {}), **job_report(sampler.sample(), **asked)}

    def tell_layouts(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.inspection.shards import layout_report

        known, gradients = str(content.get("known", "")), bool(content.get("gradients"))
        try:
            return layout_report(content["names"], gradients=gradients, known=known)
        except UsageError as error:
            return {"refused": str(error)}

    def tell_memory(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.inspection.memory import memory_report

        try:
            return memory_report(content["names"])
        except UsageError as error:
            return {"refused": str(error)}

    def planner_inputs(content: dict[str, Any]) -> dict[str, Any]:

        known, stages = str(content.get("known", "")), bool(content.get("stages"))
        return report_plan(content["names"], asked=content.get("asked"), known=known, stages=stages)

    def tell_mesh(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.inspection.variables import mesh_fields

        return {"mesh": mesh_fields()}

    asked_often = {"axon_job": tell_job, "axon_layouts": tell_layouts, "axon_memory": tell_memory}
    priced = {name: _priced(handler) for name, handler in asked_often.items()}
    return {**priced, "axon_mesh": tell_mesh, "axon_plan": planner_inputs}


def _priced(handler: Callable[[dict[str, Any]], dict[str, Any]]) -> ControlHandler:
    """The handler, whose answer also says what it cost: ``spent_s``, seconds of CPU of the thread that answers."""

    def answer(content: dict[str, Any]) -> dict[str, Any]:
        began = time.thread_time()
        told = handler(content)
        return {**told, "spent_s": time.thread_time() - began}

    return answer


def control_handlers(
    sampler: Sampler, interrupts: InterruptHandler, telemetry: Telemetry, log: CellLog
) -> dict[str, ControlHandler]:
    """The requests of the control channel, by message type."""

    def status(content: dict[str, Any]) -> dict[str, Any]:
        return dataclasses.asdict(sampler.sample())

    def watch(content: dict[str, Any]) -> dict[str, Any]:
        telemetry.watch(hz=float(content["hz"]), seconds=float(content["seconds"]))
        return {}

    def abort_cell(content: dict[str, Any]) -> dict[str, Any]:
        # The flag first: what the interrupt wakes must not begin to wait again.
        ABORT.set()
        unheard = interrupts.unheard
        interrupted = interrupts.interrupt(content.get("run"))
        abort(again=bool(content.get("again")))
        return {"interrupted": interrupted, "unheard": unheard, "line": sampler.sample().line if unheard else None}

    def tell_waits(content: dict[str, Any]) -> dict[str, Any]:
        state = sampler.sample()
        own = {"rank": state.rank, "running": state.cell is not None, "line": state.line, "call": state.call}
        own["via"], own["waited"] = sampler.via() if state.call else ("", 0)
        return {**own, **waits(), "threads": user_threads()}

    def stacks(content: dict[str, Any]) -> dict[str, Any]:
        return {"state": dataclasses.asdict(sampler.sample()), "frames": cell_stack(current(), interrupts)}

    def tell_spans(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.inspection.spans import span_reader

        return span_reader().read(since=int(content["since"]), watch_s=float(content["watch"]))

    def stop(content: dict[str, Any]) -> dict[str, Any]:
        stop_at(int(content["at"]), group=str(content["group"]))
        return {}

    def tell_cells(content: dict[str, Any]) -> dict[str, Any]:
        asked = {"run": content.get("run"), "since": content.get("since", 0), "after_ns": content.get("after_ns", 0)}
        return {"cells": log.report(**asked), "running": interrupts.running, **condition()}

    return {
        "axon_abort": abort_cell,
        "axon_cells": tell_cells,
        "axon_spans": tell_spans,
        "axon_stacks": stacks,
        "axon_status": status,
        "axon_stop": stop,
        "axon_waits": tell_waits,
        "axon_watch": watch,
        **view_handlers(sampler, tell_waits),
    }


def report_plan(
    names: Sequence[str], *, asked: Mapping[str, Any] | None, known: str, stages: bool = False
) -> dict[str, Any]:
    """The answer to ``axon_plan``: of `memory_plan.planner_inputs`, ``is_pending`` while that is import_in_background, or ``refused``.

    Args:
        names: A model, and its optimizers where they are named.
        asked: What is asked instead of what is; None: nothing.
        known: The key of the model that the notebook has already.
        stages: Of a pipeline: this rank's stages alone are wanted.
    """
    from axon_nb.engine.inspection.memory import import_in_background, modules_and_optimizers

    session = current()
    try:
        modules, optimizers = modules_and_optimizers(list(names), session)
        if len(modules) != 1:
            return {"refused": f"A plan is of one model, and {', '.join(names)} has {len(modules)}: `%memory model`."}
        planner = import_in_background("axon_nb.engine.inspection.memory_plan")
        if planner is None:
            return {"is_pending": True}
        options: dict[str, Any] = {"asked": asked, "known": known, "stages": stages}
        answer: dict[str, Any] = planner.planner_inputs(modules[0], optimizers, session, **options)
    except (UsageError, ImportError) as error:
        return {"refused": str(error)}
    return answer
