"""A question for a plan of memory on its way to the model that it is about; the planner is loaded on first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axon_nb.engine.session import current
from axon_nb.errors import UsageError

__all__ = ["plan_report"]


def plan_report(
    names: Sequence[str], *, asked: Mapping[str, Any] | None, known: str, stages: bool = False
) -> dict[str, Any]:
    """The answer to ``axon_plan``: of `memory_plan.tell_plan`, ``is_pending`` while that is loaded, or ``refused``.

    Args:
        names: A model, and its optimizers where they are named.
        asked: What is asked instead of what is; None: nothing.
        known: The key of the model that the notebook has already.
        stages: Of a pipeline: this rank's stages alone are wanted.
    """
    from axon_nb.engine.later import loaded
    from axon_nb.engine.memory import modules_and_optimizers

    session = current()
    try:
        modules, optimizers = modules_and_optimizers(list(names), session)
        if len(modules) != 1:
            return {"refused": f"A plan is of one model, and {', '.join(names)} has {len(modules)}: `%memory model`."}
        planner = loaded("axon_nb.engine.memory_plan")
        if planner is None:
            return {"is_pending": True}
        options: dict[str, Any] = {"asked": asked, "known": known, "stages": stages}
        answer: dict[str, Any] = planner.tell_plan(modules[0], optimizers, session, **options)
    except (UsageError, ImportError) as error:
        return {"refused": str(error)}
    return answer
