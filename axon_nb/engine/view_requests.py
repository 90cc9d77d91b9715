"""What a rank answers to the views of a running job, and what that costs; their code is loaded on first use."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from axon_nb.engine.kernel_hooks import ControlHandler
from axon_nb.engine.sampler import Sampler
from axon_nb.errors import UsageError

__all__ = ["view_handlers"]


def view_handlers(sampler: Sampler, tell_waits: ControlHandler) -> dict[str, ControlHandler]:
    """The requests of `%watch`, `%memory`, `%shards` and the cluster's card, by message type.

    Args:
        sampler: Of this rank.
        tell_waits: The handler of ``axon_waits``, whose answer is part of that to ``axon_job``.
    """

    def tell_job(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.job import job_report

        asked = {name: int(content.get(name, 0)) for name in ("pid", "position", "span_position", "since_ns")}
        return {**(tell_waits({}) or {}), **job_report(sampler.sample(), **asked)}

    def tell_layouts(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.layouts import layout_report

        known, gradients = str(content.get("known", "")), bool(content.get("gradients"))
        try:
            return layout_report(content["names"], gradients=gradients, known=known)
        except UsageError as error:
            return {"refused": str(error)}

    def tell_memory(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.memory import memory_report

        try:
            return memory_report(content["names"])
        except UsageError as error:
            return {"refused": str(error)}

    def tell_plan(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.plan_request import plan_report

        known, stages = str(content.get("known", "")), bool(content.get("stages"))
        return plan_report(content["names"], asked=content.get("asked"), known=known, stages=stages)

    def tell_mesh(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.meshes import mesh_fields

        return {"mesh": mesh_fields()}

    asked_often = {"axon_job": tell_job, "axon_layouts": tell_layouts, "axon_memory": tell_memory}
    priced = {name: _priced(handler) for name, handler in asked_often.items()}
    return {**priced, "axon_mesh": tell_mesh, "axon_plan": tell_plan}


def _priced(handler: Callable[[dict[str, Any]], dict[str, Any]]) -> ControlHandler:
    """The handler, whose answer also says what it cost: ``spent_s``, seconds of CPU of the thread that answers."""

    def answer(content: dict[str, Any]) -> dict[str, Any]:
        began = time.thread_time()
        told = handler(content)
        return {**told, "spent_s": time.thread_time() - began}

    return answer
