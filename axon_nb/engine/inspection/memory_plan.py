"""What a planner of memory asks this rank: the model without its data, how it is trained, and its states by formula."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

import axon_nb.plan.footprint.question  # noqa: F401 -- takes a second to import: not on the thread that answers
from axon_nb import plan
from axon_nb.engine.inspection.model_facts import ModelFacts, describe_model, model_key
from axon_nb.engine.inspection.model_skeleton import SkeletonError, inner_model, skeleton
from axon_nb.engine.inspection.pipeline_facts import find_pipeline, stage_skeletons
from axon_nb.engine.session import RankSession
from axon_nb.errors import UsageError
from axon_nb.records.memory import MemorySetup, changed

__all__ = ["planner_inputs"]

_kept: dict[str, bytes] = {}
"""The last skeleton, by the model's key."""


def planner_inputs(
    module: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    session: RankSession,
    *,
    asked: Mapping[str, Any] | None,
    known: str,
    stages: bool = False,
) -> dict[str, Any]:
    """The answer to one question.

    Args:
        module: The model, as the user has it.
        optimizers: Those that step its parameters.
        session: This rank.
        asked: Fields of `MemorySetup`; None: as it is.
        known: The key of the model that the notebook has already.
        stages: Of a pipeline: this rank's stages alone are wanted.

    Returns:
        ``key``; ``facts``: of `ModelFacts`; ``setup``: what is planned for; ``states``: bytes of the rank that has
        most of them, by role, by formula; ``host``: those in the host's memory; ``model``: its skeleton in base64, None
        where the notebook has it; ``refused`` instead: why there is no plan, beside ``facts`` where there is one of
        another question. Of a pipeline ``ranks``, by stage, instead of a model and its states; ``first``, the rank to
        ask, where that is another one; with `stages` the answer of `stage_skeletons` alone.
    """
    if (pipeline := find_pipeline(module)) is not None and (stages or not pipeline.is_first):
        try:
            return {"stages": stage_skeletons(module)} if stages else {"first": pipeline.stage_ranks()[0]}
        except SkeletonError as error:
            return {"refused": f"There is no plan: {error}"}
    facts = describe_model(module, optimizers, session)
    told: dict[str, Any] = {"facts": {**dataclasses.asdict(facts), "device": session.device.type}}
    try:
        setup = facts.setup if asked is None else changed(facts.setup, asked)
        told |= {"setup": dataclasses.asdict(setup), "key": model_key(module)}
        if pipeline is not None:
            return {**told, "ranks": {str(stage): rank for stage, rank in pipeline.stage_ranks().items()}}
        factory = _skeleton(module, told["key"])
        states = _by_formula(factory, setup, facts, session)
        sent = None if known == told["key"] else base64.b64encode(factory).decode()
        return {**told, "model": sent, **states}
    except SkeletonError as error:
        return {"refused": f"There is no plan: {error}"}
    except UsageError as error:
        return {**told, "refused": str(error)}


def _skeleton(module: torch.nn.Module, key: str) -> bytes:
    if key not in _kept:
        made = skeleton(inner_model(module))
        _kept.clear()
        _kept[key] = made
    return _kept[key]


def _by_formula(factory: bytes, setup: MemorySetup, facts: ModelFacts, session: RankSession) -> dict[str, Any]:
    optimizer, options = setup.optimizer_arguments
    if setup.optimizer == facts.setup.optimizer:
        options = facts.optimizer_options
    made = plan.memory(
        plan.CapturedModel("model", factory),
        mesh=setup.mesh,
        strategy=setup.strategy,
        inputs=plan.TensorSpec((1,)),  # nothing is run
        optimizer=optimizer,
        optimizer_options=options,
        dtype=setup.dtype or None,
        mixed_precision=setup.mixed_precision or None,
        cpu_offload=setup.offload,
        batch=setup.batch,
        device=session.device.type,
        fragmentation=0.0,
        method="closed_form",
    )
    worst = made.worst
    return {
        "states": {name: size for name, size in worst.persistent.as_dict().items() if size},
        "host": worst.host_bytes,
    }
