"""Collects what the memory planner needs from this rank: a model skeleton, its training setup, its states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

import axon_nb.plan.footprint.question  # noqa: F401 -- takes a second: not in the answering thread
from axon_nb import plan
from axon_nb.engine.inspection.last_call import CallRecorder
from axon_nb.engine.inspection.model_facts import describe_model, model_key
from axon_nb.engine.inspection.pipeline_facts import find_pipeline, stage_skeletons
from axon_nb.engine.session import RankSession
from axon_nb.errors import UsageError
from axon_nb.plan.errors import CaptureError
from axon_nb.plan.skeleton import capture
from axon_nb.records.memory import MemorySetup, changed
from axon_nb.records.protocol.contents import ModelFacts, PlanReply


class Planner:
    """Answers plan requests.

    Args:
        session: This rank.
        calls: How its models were called.
    """

    def __init__(self, session: RankSession, calls: CallRecorder) -> None:
        self._session = session
        self._calls = calls
        self._skeleton = ("", b"")
        """Key and skeleton of the last model."""

    def inputs(
        self,
        module: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        *,
        what_if: Mapping[str, Any] | None,
        known_key: str,
        stages_only: bool = False,
    ) -> PlanReply:
        """Answer one plan request.

        Args:
            module: The model as the user holds it.
            optimizers: The optimizers that step its parameters.
            what_if: Fields of `MemorySetup` to change; None: the current setup.
            known_key: Key of the model that the notebook already has.
            stages_only: Whether to return only this rank's stages of a pipeline.
        """
        session = self._session
        if (pipeline := find_pipeline(module)) is not None and (stages_only or not pipeline.is_first):
            try:
                if stages_only:
                    return PlanReply(stages=stage_skeletons(module))
                return PlanReply(first_rank=pipeline.stage_ranks()[0])
            except CaptureError as error:
                return PlanReply(refused=str(error))
        facts = describe_model(module, optimizers, session, self._calls)
        facts = dataclasses.replace(facts, device=session.device.type)
        reply = PlanReply(facts=facts)
        try:
            setup = facts.setup if what_if is None else changed(facts.setup, what_if)
            reply = dataclasses.replace(reply, setup=setup, key=model_key(module, self._calls))
            if pipeline is not None:
                return dataclasses.replace(reply, ranks=dict(pipeline.stage_ranks()))
            factory = self._skeleton_of(module, reply.key)
            states, host = _estimate_states(factory, setup, facts, session)
            model = None if known_key == reply.key else factory
            return dataclasses.replace(reply, model=model, states=states, host=host)
        except CaptureError as error:
            return PlanReply(refused=str(error))
        except UsageError as error:
            return dataclasses.replace(reply, refused=str(error))

    def _skeleton_of(self, module: torch.nn.Module, key: str) -> bytes:
        if self._skeleton[0] != key:
            self._skeleton = (key, capture(module, bare=True).factory)
        return self._skeleton[1]


def _estimate_states(
    factory: bytes, setup: MemorySetup, facts: ModelFacts, session: RankSession
) -> tuple[dict[str, int], int]:
    """Estimate, for the rank that holds most, the bytes by role, and those in host memory."""
    optimizer, options = setup.optimizer_arguments
    if setup.optimizer == facts.setup.optimizer:
        options = dict(facts.optimizer_options)
    estimate = plan.memory(
        plan.CapturedModel("model", factory),
        mesh=setup.mesh,
        strategy=setup.strategy,
        inputs=plan.TensorSpec((1,)),  # nothing runs
        optimizer=optimizer,
        optimizer_options=options,
        dtype=setup.dtype or None,
        mixed_precision=setup.mixed_precision or None,
        cpu_offload=setup.cpu_offload,
        batch=setup.batch,
        device=session.device.type,
        fragmentation=0.0,
        method="closed_form",
    )
    worst = estimate.worst
    return {name: size for name, size in worst.persistent.as_dict().items() if size}, worst.host_bytes
