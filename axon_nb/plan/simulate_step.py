"""One training step of one rank, run without data and logged."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from axon_nb.plan.memory_request import OFFLOADED, MemoryRequest
from axon_nb.plan.simulate_depth import Run
from axon_nb.plan.simulate_hooks import GLOO_COPIES, fake_world, fakes
from axon_nb.plan.simulate_model import TrainingSetup, explain_failure
from axon_nb.plan.simulate_pipeline import pipeline_of
from axon_nb.plan.simulate_replay import Step
from axon_nb.plan.simulate_tracker import StorageLog
from axon_nb.plan.simulate_training import RankMeshes, Training, shard_layers, training_of

__all__ = ["StepRun", "ran"]


@dataclass(frozen=True)
class StepRun:
    """One step of one rank."""

    step: Step
    modules: dict[str, tuple[int, int, int]]
    """Bytes of parameters, gradients and optimizer states of each module alone."""

    @property
    def host_bytes(self) -> int:
        """What offloading keeps in the host's memory between steps."""
        return sum(self.step.held(role) for role in self.step.offloaded)


def ran(question: TrainingSetup, rank: int, run: Run | None = None, depth: int = 0) -> StepRun:
    """Make a rank's model, train it until all is there, and log one more step.

    Args:
        question: What is run.
        rank: Which rank of the world.
        run: Blocks of which only `depth` are made; None: all.
        depth: How many.

    Raises:
        PlanError: the model cannot be made or run without data.
    """
    request = question.request
    with fake_world(rank, request.world_size):
        meshes = RankMeshes.of(request)
        with fakes(), StorageLog(GLOO_COPIES if request.device == "cpu" else None) as log:
            training = _training(question, question.model(run, depth), meshes)
            log.follow(training.model)
            with explain_failure("run", "inputs=, target= and loss= are what the model takes and gives"):
                training.make_states()
                gc.collect()
                return _logged(training, log, request)


def _training(question: TrainingSetup, model: nn.Module, meshes: RankMeshes) -> Training:
    if meshes.stages is not None:
        return pipeline_of(question, model, meshes)
    return training_of(question, shard_layers(question, model, meshes), meshes)


def _logged(training: Training, log: StorageLog, request: MemoryRequest) -> StepRun:
    parameters = list(training.model.parameters())
    log.mark("other", [*training.model.buffers(), *training.counts()])
    log.mark("parameters", parameters)
    log.mark("optimizer", training.states())
    log.mark("activations", [item for item in tree_leaves(training.inputs) if isinstance(item, torch.Tensor)])
    log.mark_rest("communication")
    log.begin()
    training.compute(log.enter_phase)
    log.mark("gradients", [parameter.grad for parameter in parameters if parameter.grad is not None])
    log.enter_phase("optimizer")
    training.optimizer.step()
    log.mark("parameters", parameters)  # offloaded ones have been there and back
    log.mark("optimizer", training.states())
    step = Step(
        dict(log.start),
        tuple(log.changes),
        dict(log.roles),
        dict(log.makers),
        offloaded=OFFLOADED[request.cpu_offload],
        own_memory=request.device == "cuda",
    )
    return StepRun(step, training.modules())
