"""Runs one training step of one rank without data, and logs it."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from axon_nb.plan.footprint.fake_world import GLOO_COPIES, fake_tensors, fake_world
from axon_nb.plan.footprint.pipeline import make_pipeline_training
from axon_nb.plan.footprint.question import TrainingSetup, explain_failure
from axon_nb.plan.footprint.replay import StepLog
from axon_nb.plan.footprint.request import OFFLOADED, MemoryRequest
from axon_nb.plan.footprint.storage_log import StorageLog
from axon_nb.plan.footprint.training import RankMeshes, Training, make_training, shard_layers
from axon_nb.plan.repetition.alike import BlockRun


@dataclass(frozen=True)
class StepRun:
    """The logged step of one rank."""

    step: StepLog
    modules: dict[str, tuple[int, int, int]]
    """Bytes of parameters, gradients and optimizer states of each module, without submodules."""

    @property
    def host_bytes(self) -> int:
        """Bytes that offloading keeps in host memory between steps."""
        return sum(self.step.bytes_of(role) for role in self.step.offloaded)


def run_step(setup: TrainingSetup, rank: int, run: BlockRun | None = None, depth: int = 0) -> StepRun:
    """Build a rank's model, create its optimizer states, and log one step.

    Args:
        setup: What to run.
        rank: The rank of the world.
        run: Blocks of which only `depth` groups are made; None: all.
        depth: Number of groups.

    Raises:
        PlanError: the model cannot be built or run without data.
    """
    request = setup.request
    with fake_world(rank, request.world_size):
        meshes = RankMeshes.of(request)
        with fake_tensors(), StorageLog(GLOO_COPIES if request.device == "cpu" else None) as log:
            training = _training(setup, setup.model(run, depth), meshes)
            log.follow(training.model)
            with explain_failure("run", "check that inputs=, target= and loss= fit the model"):
                training.make_states()
                gc.collect()
                return _logged(training, log, request)


def _training(setup: TrainingSetup, model: nn.Module, meshes: RankMeshes) -> Training:
    if meshes.stages is not None:
        return make_pipeline_training(setup, model, meshes)
    return make_training(setup, shard_layers(setup, model, meshes), meshes)


def _logged(training: Training, log: StorageLog, request: MemoryRequest) -> StepRun:
    parameters = list(training.model.parameters())
    log.mark("other", [*training.model.buffers(), *training.scalar_states()])
    log.mark("parameters", parameters)
    log.mark("optimizer", training.states())
    log.mark("activations", [item for item in tree_leaves(training.inputs) if isinstance(item, torch.Tensor)])
    log.mark_rest("communication")
    log.begin()
    training.compute(log.enter_phase)
    log.mark("gradients", [parameter.grad for parameter in parameters if parameter.grad is not None])
    log.enter_phase("optimizer")
    training.optimizer.step()
    log.mark("parameters", parameters)  # offloaded ones were moved and returned
    log.mark("optimizer", training.states())
    step = StepLog(
        dict(log.start),
        tuple(log.changes),
        dict(log.roles),
        dict(log.makers),
        offloaded=OFFLOADED[request.cpu_offload],
        own_memory=request.device == "cuda",
    )
    return StepRun(step, training.modules())
