"""What a rank answers to the views of a running job; their code is loaded on first use, as few sessions look."""

from __future__ import annotations

from typing import Any

from axon_nb.engine.kernel_hooks import ControlHandler
from axon_nb.engine.sampler import Sampler
from axon_nb.errors import UsageError

__all__ = ["view_handlers"]


def view_handlers(sampler: Sampler, tell_waits: ControlHandler) -> dict[str, ControlHandler]:
    """The requests of `%watch`, `%memory` and the cluster's card, by message type.

    Args:
        sampler: Of this rank.
        tell_waits: The handler of ``axon_waits``, whose answer is part of that to ``axon_job``.
    """

    def tell_job(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.job import job_report

        asked = {name: int(content.get(name, 0)) for name in ("pid", "position", "span_position", "since_ns")}
        return {**(tell_waits({}) or {}), **job_report(sampler.sample(), **asked)}

    def tell_memory(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.memory import memory_report

        try:
            return memory_report(content["names"])
        except UsageError as error:
            return {"refused": str(error)}

    def tell_plan(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.plan_request import plan_report

        return plan_report(content["names"], asked=content.get("asked"), known=str(content.get("known", "")))

    def tell_mesh(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.meshes import mesh_fields

        return {"mesh": mesh_fields()}

    return {"axon_job": tell_job, "axon_memory": tell_memory, "axon_mesh": tell_mesh, "axon_plan": tell_plan}
