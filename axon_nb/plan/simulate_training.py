"""A rank's model as it is trained: cut over ranks, sharded or copied, with its optimizer and its step."""

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

from axon_nb.parallel.fsdp import FSDP
from axon_nb.parallel.gathering import local_shard
from axon_nb.parallel.offload import offload_states
from axon_nb.parallel.optimizer_state import OptimizerKind, local_optimizer, optimizer_states
from axon_nb.parallel.strategies import CPUOffload, ShardingStrategy
from axon_nb.parallel.zero import _zero_redundancy
from axon_nb.plan.memory_request import MemoryRequest
from axon_nb.plan.module_kinds import kinds_in
from axon_nb.plan.simulate_hooks import mesh_of
from axon_nb.plan.simulate_model import Question, optimizer_of

__all__ = ["Enter", "Meshes", "Shape", "Training", "cut_layers", "shapes_of", "training_of"]

Shape = tuple[tuple[int, ...], torch.dtype, bool]
"""Of a parameter: shape, dtype, whether it is trained."""

Enter = Callable[[str], None]
"""Told which phase of a step begins."""


@dataclass(frozen=True)
class Meshes:
    """The ranks, along the axes of samples, layers and stages; made before there are fake tensors."""

    data: DeviceMesh
    layers: DeviceMesh | None
    stages: DeviceMesh | None

    @staticmethod
    def of(request: MemoryRequest) -> Meshes:
        """Those of a request."""
        no_shard = request.strategy == "no_shard"  # every rank a copy, each "sharded" over itself alone
        axes = dict(request.mesh)
        if no_shard:
            axes = {"replicate": axes.get("dp", 1), "shard": 1} | {k: v for k, v in axes.items() if k != "dp"}
        elif request.strategy != "hybrid_shard":
            axes.setdefault("dp", 1)  # at the end, where its place does not matter
        whole = mesh_of(axes)
        data = ("replicate", "shard") if "shard" in axes else ("dp",)
        own = whole if tuple(axes) == data else whole[data if len(data) > 1 else data[0]]
        cut, piped = (whole[axis] if request.size(axis) > 1 else None for axis in ("tp", "pp"))
        return Meshes(own, cut, piped)


@dataclass(frozen=True)
class Training:
    """One rank's part of a model in training."""

    model: nn.Module
    """What has the parameters; its modules have the names of the model as it was given."""
    optimizer: Optimizer
    compute: Callable[[Enter], None]
    """Forward and backward of one batch; it is given a function to say which of the two begins."""
    inputs: tuple[Any, ...]

    def make_states(self) -> None:
        """Have the optimizer make its states, as its first step does: a step without them is not like the others."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def states(self) -> list[torch.Tensor]:
        """The optimizer's, but for single numbers."""
        return optimizer_states(self.optimizer)

    def counts(self) -> list[torch.Tensor]:
        """The optimizer's single numbers."""
        values = [value for state in local_optimizer(self.optimizer).state.values() for value in state.values()]
        return [value for value in values if isinstance(value, torch.Tensor) and value.ndim == 0]

    def modules(self) -> dict[str, tuple[int, int, int]]:
        """Bytes of parameters, gradients and optimizer states of each module alone, without padding."""
        states = local_optimizer(self.optimizer).state
        found = {}
        for name, module in self.model.named_modules():
            own = list(module.parameters(recurse=False))
            kept = [value for p in own if p in states for value in states[p].values()]
            found[name] = (
                _bytes(own),
                _bytes([p.grad for p in own if p.grad is not None]),
                _bytes([value for value in kept if isinstance(value, torch.Tensor) and value.ndim]),
            )
        return found


def cut_layers(question: Question, model: nn.Module, meshes: Meshes) -> nn.Module:
    """Leave this rank its part of the layers; changed in place."""
    if meshes.layers is not None:
        # Rank 0's values are sent to all first: here are no values, and no other ranks.
        module: Any = import_module("axon_nb.parallel.tensor.parallelize")
        sends = module.broadcast
        module.broadcast = lambda tensor, **_: tensor
        try:
            module.parallelize(model, question.request.tp_plan, mesh=meshes.layers)
        finally:
            module.broadcast = sends
    return model


def shapes_of(modules: Iterable[nn.Module]) -> list[Shape]:
    """A rank's parameters, before they are sharded over samples."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return [(tuple(local_shard(p).shape), p.dtype, p.requires_grad) for p in parameters]


def training_of(question: Question, model: nn.Module, meshes: Meshes) -> Training:
    """Shard or copy a model as the request says, and make its optimizer.

    Args:
        question: What is run.
        model: Made by it, its layers cut; changed in place.
        meshes: The ranks.

    Raises:
        UsageError: it cannot be sharded so.
    """
    request = question.request
    whole = request.strategy in ("ddp", "optimizer_state")
    kind = optimizer_of(request)
    args, target = question.inputs(), question.target()
    if request.is_bare:
        wrapped, optimizer = model, kind.make(list(model.parameters()), **kind.options)
    else:
        wrapped, optimizer = (_in_ddp if whole else _in_fsdp)(model, request, meshes.data, kind)
    precise = request.mixed_precision is None or not whole
    casting = contextlib.nullcontext if precise else functools.partial(_autocast, str(request.mixed_precision))

    def compute(enter: Enter) -> None:
        enter("forward")
        with casting():
            loss = question.loss(wrapped(*args), target)
        enter("backward")
        loss.backward()

    return Training(model, optimizer, compute, (args, target))


def _in_fsdp(
    model: nn.Module, request: MemoryRequest, mesh: DeviceMesh, kind: OptimizerKind
) -> tuple[nn.Module, Optimizer]:
    wrapped = FSDP(
        model,
        strategy=ShardingStrategy(request.strategy),
        mesh=mesh,
        wrap=kinds_in(model, request.wrap, "wrap"),
        mixed_precision=None if request.mixed_precision is None else getattr(torch, request.mixed_precision),
        cpu_offload=CPUOffload(request.offload),
        sync_parameters=False,
    )
    return wrapped, wrapped.optimizer(kind.make, **kind.options)


def _in_ddp(
    model: nn.Module, request: MemoryRequest, mesh: DeviceMesh, kind: OptimizerKind
) -> tuple[nn.Module, Optimizer]:
    """As `axon_nb.parallel.DDP` and `ZeRO1`, which would ask the other ranks about their models first."""
    sharded = request.strategy == "optimizer_state"
    group: Any = mesh.get_group()
    wrapped = DistributedDataParallel(model, process_group=group, init_sync=False, gradient_as_bucket_view=sharded)
    # What the group without other ranks gives as the result of its all-reduce is not what DDP expects.
    wrapped.register_comm_hook(None, noop_hook)
    parameters = list(model.parameters())
    if not sharded:
        return wrapped, kind.make(parameters, **kind.options)
    options: dict[str, Any] = {"parameters_as_bucket_view": True, **kind.options}
    optimizer: Optimizer = _zero_redundancy()(parameters, optimizer_class=kind.make, process_group=group, **options)
    if request.offload == "optimizer_states":
        offload_states(optimizer, torch.device("cpu"))
    return wrapped, optimizer


@contextlib.contextmanager
def _autocast(dtype: str) -> Iterator[None]:
    with torch.autocast("cpu", getattr(torch, dtype)):
        yield


def _bytes(tensors: list[Any]) -> int:
    return sum(local_shard(tensor).nbytes for tensor in tensors)
