"""Whether a model can be trained by all ranks of a group together, asked before anything else is sent."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from axon_nb.comm.errors import CommError, TensorError, TensorMismatch
from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.kinds import Backend
from axon_nb.comm.move import broadcast

__all__ = ["check_model", "share_start"]

Description = list[tuple[str, str, tuple[int, ...], str]]


def check_model(model: nn.Module, group: ProcessGroup) -> None:
    """Look at the model here, and compare it with those of the other ranks; collective.

    What is wrong on one rank is raised on all of them, so that none waits for it. (Torch's own check compares shapes
    alone and names neither the parameter nor the rank.)

    Raises:
        CommError: no parameter needs a gradient.
        TensorError: parameters are on different devices, have no data yet, or are where the group does not reach.
        TensorMismatch: the model differs between ranks; names the parameter and the rank.
    """
    problem = _problem(model, group)
    own = _description(model) if problem is None else problem
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, own, group=group.torch_group)
    if problem is not None:
        raise problem
    for rank, theirs in zip(group.ranks, everyone, strict=True):
        if isinstance(theirs, CommError):
            raise type(theirs)(f"on rank {rank}: {theirs}")
    for rank, theirs in zip(group.ranks, everyone, strict=True):
        _compare(everyone[0], theirs, group.ranks[0], rank)


def _shared(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Parameters and buffers, but for those that torch was told to leave alone."""
    left_alone = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    parameters = {name: item for name, item in model.named_parameters() if name not in left_alone}
    return parameters, {name: item for name, item in model.named_buffers() if name not in left_alone}


def _problem(model: Any, group: ProcessGroup) -> CommError | None:
    if not isinstance(model, nn.Module):
        what = "a class: make a model of it first" if isinstance(model, type) else "no nn.Module"
        return CommError(f"model={model!r} is {what}.")
    parameters, buffers = _shared(model)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        return CommError(
            f"{type(model).__name__} has no parameter that needs a gradient, so there is nothing to average: "
            "use the model as it is."
        )
    shapeless: list[str] = [name for name, item in (*parameters.items(), *buffers.items()) if is_lazy(item)]
    if shapeless:
        return TensorError(f"{shapeless[0]} has no shape yet: run the model once on a sample, then wrap it.")
    kinds = {parameter.device.type for parameter in parameters.values()}
    if len(kinds) > 1:
        return TensorError(f"the model's parameters are on {' and '.join(sorted(kinds))}: model.to(device) first.")
    if kinds == {"meta"}:
        return TensorError("the model's parameters are on meta, without data: model.to_empty(device=…) first.")
    if kinds != {"cuda"} and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return TensorError(
            f"torch's SyncBatchNorm works on GPUs only, and the model is on {kinds.pop()}: "
            "axon_nb.parallel.SyncBatchNorm.convert(model) works anywhere."
        )
    if group.backend is Backend.NCCL and kinds != {"cuda"}:
        return TensorError(f"the model is on {kinds.pop()} and NCCL reaches GPUs only: model.to(device) first.")
    return None


def _description(model: nn.Module) -> Description:
    parameters, buffers = _shared(model)
    described = [
        (name, str(item.dtype), tuple(item.shape), "" if item.requires_grad else " without gradient")
        for name, item in parameters.items()
    ]
    return described + [(name, str(item.dtype), tuple(item.shape), ", a buffer") for name, item in buffers.items()]


def _compare(first: Description, theirs: Description, first_rank: int, rank: int) -> None:
    if theirs == first:
        return
    pair = next(((a, b) for a, b in zip(first, theirs, strict=False) if a != b), None)
    here, there = (f"{len(first)} parameters and buffers", str(len(theirs))) if pair is None else map(_shown, pair)
    raise TensorMismatch(
        f"the model differs between ranks: rank {first_rank} has {here}, rank {rank} {there}; "
        "build the same model on every rank."
    )


def _shown(item: tuple[str, str, tuple[int, ...], str]) -> str:
    name, dtype, shape, note = item
    return f"{name} of {dtype} {shape}{note}"


@torch.no_grad()
def share_start(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all ranks of the mesh the parameters and buffers of its first one; collective.

    Tensors without data yet are left alone, and of a DTensor, which another axis cuts, each rank's part is sent.

    Raises:
        TensorMismatch: a tensor has another shape or dtype on another rank.
    """
    groups = [ProcessGroup.wrap(mesh.get_group(dim)) for dim in reversed(range(mesh.ndim)) if mesh.size(dim) > 1]
    for tensor in (*model.parameters(), *model.buffers()):
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        if own.is_meta or not own.numel():
            continue
        # One at a time: a whole model may not fit where the group reaches.
        there = own.to(mesh.device_type) if groups and groups[0].backend is Backend.NCCL else own
        there = there.contiguous()
        for group in groups:
            broadcast(there, group=group)
        if there is not own:
            own.copy_(there)
