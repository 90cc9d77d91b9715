"""What a planner of memory asks this rank: the model without its data, how it is trained, and its states by formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

import axon_nb.plan.footprint.question  # noqa: F401 -- takes a second to import: not on the thread that answers
from axon_nb import plan
from axon_nb.engine.inspection.model_facts import facts_of, model_key
from axon_nb.engine.inspection.model_skeleton import NoSkeleton, inner_model, skeleton
from axon_nb.engine.inspection.pipeline_facts import held_stages, stages_sent
from axon_nb.engine.session import RankSession
from axon_nb.errors import UsageError
from axon_nb.records.memory import MemorySetup, changed
from axon_nb.records.protocol.contents import ModelFacts, PlanReply

__all__ = ["tell_plan"]

_kept: dict[str, bytes] = {}
"""The last skeleton, by the model's key."""


def tell_plan(
    module: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    session: RankSession,
    *,
    asked: Mapping[str, Any] | None,
    known: str,
    stages: bool = False,
) -> PlanReply:
    """The answer to one question.

    Args:
        module: The model, as the user has it.
        optimizers: Those that step its parameters.
        session: This rank.
        asked: Fields of `MemorySetup`; None: as it is.
        known: The key of the model that the notebook has already.
        stages: Of a pipeline: this rank's stages alone are wanted.
    """
    if (pipeline := held_stages(module)) is not None and (stages or not pipeline.is_first):
        try:
            return PlanReply(stages=stages_sent(module)) if stages else PlanReply(first=pipeline.stage_ranks()[0])
        except NoSkeleton as error:
            return PlanReply(refused=f"There is no plan: {error}")
    facts = dataclasses.replace(facts_of(module, optimizers, session), device=session.device.type)
    told = PlanReply(facts=facts)
    try:
        setup = facts.setup if asked is None else changed(facts.setup, asked)
        told = dataclasses.replace(told, setup=setup, key=model_key(module))
        if pipeline is not None:
            return dataclasses.replace(told, ranks=dict(pipeline.stage_ranks()))
        factory = _skeleton(module, told.key)
        states, host = _by_formula(factory, setup, facts, session)
        sent = None if known == told.key else factory
        return dataclasses.replace(told, model=sent, states=states, host=host)
    except NoSkeleton as error:
        return PlanReply(refused=f"There is no plan: {error}")
    except UsageError as error:
        return dataclasses.replace(told, refused=str(error))


def _skeleton(module: torch.nn.Module, key: str) -> bytes:
    if key not in _kept:
        made = skeleton(inner_model(module))
        _kept.clear()
        _kept[key] = made
    return _kept[key]


def _by_formula(
    factory: bytes, setup: MemorySetup, facts: ModelFacts, session: RankSession
) -> tuple[dict[str, int], int]:
    """Bytes of the rank that has most of them, by role; and those in its host's memory."""
    optimizer, options = setup.optimizer_arguments
    if setup.optimizer == facts.setup.optimizer:
        options = dict(facts.optimizer_options)
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
    return {name: size for name, size in worst.persistent.as_dict().items() if size}, worst.host_bytes
