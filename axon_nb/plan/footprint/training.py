"""A rank's model in training: sharded or replicated, with its optimizer and its step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from axon_nb.parallel.data.fsdp import FSDP
from axon_nb.parallel.data.gathering import local_shard
from axon_nb.parallel.data.offload import offload_states
from axon_nb.parallel.data.zero import _zero_redundancy
from axon_nb.parallel.optimizer_kind import OptimizerKind, local_optimizer, optimizer_states
from axon_nb.parallel.strategies import CPUOffload, ShardingStrategy
from axon_nb.plan.footprint.fake_world import mesh_of
from axon_nb.plan.footprint.question import TrainingSetup, request_optimizer
from axon_nb.plan.footprint.request import MemoryRequest
from axon_nb.plan.tracing.subject import checked_module_filter

Shape = tuple[tuple[int, ...], torch.dtype, bool]
"""A parameter's shape, dtype and requires_grad."""

PhaseCallback = Callable[[str], None]
"""Called with the phase of a step that starts."""


@dataclass(frozen=True)
class RankMeshes:
    """The device meshes of data, layers and stages; made outside `fake_tensors`."""

    data: DeviceMesh
    layers: DeviceMesh | None
    stages: DeviceMesh | None

    @staticmethod
    def of(request: MemoryRequest) -> RankMeshes:
        """Make the meshes of a request."""
        no_shard = request.strategy == "no_shard"  # every rank is a replica, "sharded" over itself alone
        axes = dict(request.mesh)
        if no_shard:
            axes = {"replicate": axes.get("dp", 1), "shard": 1} | {k: v for k, v in axes.items() if k != "dp"}
        elif request.strategy != "hybrid_shard":
            axes.setdefault("dp", 1)  # at the end, where its position does not matter
        mesh = mesh_of(axes)
        data = ("replicate", "shard") if "shard" in axes else ("dp",)
        data_mesh = mesh if tuple(axes) == data else mesh[data if len(data) > 1 else data[0]]
        layers, stages = (mesh[axis] if request.size(axis) > 1 else None for axis in ("tp", "pp"))
        return RankMeshes(data_mesh, layers, stages)


@dataclass(frozen=True)
class Training:
    """One rank's training state."""

    model: nn.Module
    """Holds the parameters; its modules have the names of the original model."""
    optimizer: Optimizer
    compute: Callable[[PhaseCallback], None]
    """Runs forward and backward of one batch; its argument is called with the phase that starts."""
    inputs: tuple[Any, ...]

    def make_states(self) -> None:
        """Have the optimizer create its states, as its first step does."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def states(self) -> list[torch.Tensor]:
        """The optimizer's states, without scalars."""
        return optimizer_states(self.optimizer)

    def scalar_states(self) -> list[torch.Tensor]:
        """The optimizer's scalar states."""
        values = [value for state in local_optimizer(self.optimizer).state.values() for value in state.values()]
        return [value for value in values if isinstance(value, torch.Tensor) and value.ndim == 0]

    def modules(self) -> dict[str, tuple[int, int, int]]:
        """Bytes of parameters, gradients and optimizer states of each module, without submodules and padding."""
        states = local_optimizer(self.optimizer).state
        sizes = {}
        for name, module in self.model.named_modules():
            parameters = list(module.parameters(recurse=False))
            kept = [value for p in parameters if p in states for value in states[p].values()]
            sizes[name] = (
                _bytes(parameters),
                _bytes([p.grad for p in parameters if p.grad is not None]),
                _bytes([value for value in kept if isinstance(value, torch.Tensor) and value.ndim]),
            )
        return sizes


def shard_layers(setup: TrainingSetup, model: nn.Module, meshes: RankMeshes) -> nn.Module:
    """Shard layers over tp, in place."""
    if meshes.layers is not None:
        # `parallelize` broadcasts rank 0's values first; here there are no values and no other ranks.
        module: Any = import_module("axon_nb.parallel.tensor.parallelize")
        original = module.broadcast
        module.broadcast = lambda tensor, **_: tensor
        try:
            module.parallelize(model, setup.request.tp_plan, mesh=meshes.layers)
        finally:
            module.broadcast = original
    return model


def local_shapes(modules: Iterable[nn.Module]) -> list[Shape]:
    """Return the shapes of a rank's parameters before data ranks shard them."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return [(tuple(local_shard(p).shape), p.dtype, p.requires_grad) for p in parameters]


def make_training(setup: TrainingSetup, model: nn.Module, meshes: RankMeshes) -> Training:
    """Shard or replicate a model as requested, and make its optimizer.

    Args:
        setup: What to run.
        model: Made by `setup`, with sharded layers; changed in place.
        meshes: The ranks.

    Raises:
        UsageError: it cannot be sharded in this way.
    """
    request = setup.request
    is_replicated = request.strategy in ("ddp", "optimizer_state")
    kind = request_optimizer(request)
    args, target = setup.inputs(), setup.target()
    if request.is_unwrapped:
        wrapped, optimizer = model, kind.make(list(model.parameters()), **kind.options)
    else:
        wrapped, optimizer = (_in_ddp if is_replicated else _in_fsdp)(model, request, meshes.data, kind)
    precise = request.mixed_precision is None or not is_replicated
    casting = contextlib.nullcontext if precise else functools.partial(_autocast, str(request.mixed_precision))

    def compute(on_phase_start: PhaseCallback) -> None:
        on_phase_start("forward")
        with casting():
            loss = setup.loss(wrapped(*args), target)
        on_phase_start("backward")
        loss.backward()

    return Training(model, optimizer, compute, (args, target))


def _in_fsdp(
    model: nn.Module, request: MemoryRequest, mesh: DeviceMesh, kind: OptimizerKind
) -> tuple[nn.Module, Optimizer]:
    wrapped = FSDP(
        model,
        strategy=ShardingStrategy(request.strategy),
        mesh=mesh,
        wrap=checked_module_filter(model, request.wrap, "wrap"),
        mixed_precision=None if request.mixed_precision is None else getattr(torch, request.mixed_precision),
        cpu_offload=CPUOffload(request.cpu_offload),
        sync_parameters=False,
    )
    return wrapped, wrapped.optimizer(kind.make, **kind.options)


def _in_ddp(
    model: nn.Module, request: MemoryRequest, mesh: DeviceMesh, kind: OptimizerKind
) -> tuple[nn.Module, Optimizer]:
    """Wrap as `axon_nb.parallel.DDP` and `ZeRO1` do, without checking the other ranks' models."""
    sharded = request.strategy == "optimizer_state"
    group: Any = mesh.get_group()
    wrapped = DistributedDataParallel(model, process_group=group, init_sync=False, gradient_as_bucket_view=sharded)
    # The fake group's all-reduce does not return what DDP expects.
    wrapped.register_comm_hook(None, noop_hook)
    parameters = list(model.parameters())
    if not sharded:
        return wrapped, kind.make(parameters, **kind.options)
    options: dict[str, Any] = {"parameters_as_bucket_view": True, **kind.options}
    optimizer: Optimizer = _zero_redundancy()(parameters, optimizer_class=kind.make, process_group=group, **options)
    if request.cpu_offload == "optimizer_states":
        offload_states(optimizer, torch.device("cpu"))
    return wrapped, optimizer


@contextlib.contextmanager
def _autocast(dtype: str) -> Iterator[None]:
    with torch.autocast("cpu", getattr(torch, dtype)):
        yield


def _bytes(tensors: list[Any]) -> int:
    return sum(local_shard(tensor).nbytes for tensor in tensors)
