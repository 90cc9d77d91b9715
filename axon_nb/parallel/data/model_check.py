"""Check that all ranks of a group hold the same trainable model, before anything else is sent."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from axon_nb.comm.collectives.movement import broadcast
from axon_nb.comm.errors import TensorError, TensorMismatchError
from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.types import Backend
from axon_nb.errors import UsageError

Description = list[tuple[str, str, tuple[int, ...], str]]


def check_model(model: nn.Module, group: ProcessGroup) -> None:
    """Check the model on this rank and compare it with those of the other ranks. Collective.

    A problem on one rank is raised on all of them, so that none waits for it. (torch's own check compares shapes only
    and names neither the parameter nor the rank.)

    Raises:
        UsageError: no parameter requires a gradient.
        TensorError: parameters are on different devices, have no data yet, or are on a device the group cannot access.
        TensorMismatchError: the model differs between ranks; the message names the parameter and the rank.
    """
    problem = _problem(model, group)
    description = _description(model) if problem is None else problem
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, description, group=group.torch_group)
    if problem is not None:
        raise problem
    for rank, other in zip(group.ranks, everyone, strict=True):
        if isinstance(other, UsageError):
            raise type(other)(f"On rank {rank}: {other}")
    for rank, other in zip(group.ranks, everyone, strict=True):
        _compare(everyone[0], other, group.ranks[0], rank)


def _parameters_and_buffers(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Return parameters and buffers, except those that torch's DDP was asked to ignore."""
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    parameters = {name: item for name, item in model.named_parameters() if name not in ignored}
    return parameters, {name: item for name, item in model.named_buffers() if name not in ignored}


def _problem(model: Any, group: ProcessGroup) -> UsageError | None:
    if not isinstance(model, nn.Module):
        hint = " Create an instance first." if isinstance(model, type) else ""
        return UsageError(f"model must be an nn.Module; got {model!r}.{hint}")
    parameters, buffers = _parameters_and_buffers(model)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        return UsageError(
            f"{type(model).__name__} has no parameter that requires a gradient, so sent is nothing to average; "
            "use the model without a wrapper."
        )
    shapeless: list[str] = [name for name, item in (*parameters.items(), *buffers.items()) if is_lazy(item)]
    if shapeless:
        return TensorError(
            f"{shapeless[0]} is lazy and has no shape yet; run the model on a sample before wrapping it."
        )
    kinds = {parameter.device.type for parameter in parameters.values()}
    if len(kinds) > 1:
        return TensorError(f"The model's parameters are on {' and '.join(sorted(kinds))}; call model.to(device) first.")
    if kinds == {"meta"}:
        return TensorError(
            "The model's parameters are on the meta device and have no data; call model.to_empty(device=…) first."
        )
    if kinds != {"cuda"} and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return TensorError(
            f"torch's SyncBatchNorm works on GPUs only, and the model is on {kinds.pop()}; use "
            "axon_nb.parallel.SyncBatchNorm.convert(model), which works anywhere."
        )
    if group.backend is Backend.NCCL and kinds != {"cuda"}:
        return TensorError(f"NCCL needs CUDA tensors, and the model is on {kinds.pop()}; call model.to(device) first.")
    return None


def _description(model: nn.Module) -> Description:
    parameters, buffers = _parameters_and_buffers(model)
    described = [
        (name, str(item.dtype), tuple(item.shape), "" if item.requires_grad else " without gradient")
        for name, item in parameters.items()
    ]
    return described + [(name, str(item.dtype), tuple(item.shape), ", a buffer") for name, item in buffers.items()]


def _compare(first: Description, other: Description, first_rank: int, rank: int) -> None:
    if other == first:
        return
    pair = next(((a, b) for a, b in zip(first, other, strict=False) if a != b), None)
    own_text, other_text = (
        (f"{len(first)} parameters and buffers", str(len(other))) if pair is None else map(_describe_tensor, pair)
    )
    raise TensorMismatchError(
        f"The model differs between ranks: rank {first_rank} has {own_text}, rank {rank} has {other_text}. "
        "Build the same model on every rank."
    )


def _describe_tensor(item: tuple[str, str, tuple[int, ...], str]) -> str:
    name, dtype, shape, note = item
    return f"{name} of {dtype} {shape}{note}"


@torch.no_grad()
def broadcast_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Copy the parameters and buffers of the mesh's first rank to all its ranks. Collective.

    Tensors without data are skipped. Of a DTensor, sharded over another axis, each rank's shard is sent.

    Raises:
        TensorMismatchError: a tensor has another shape or dtype on another rank.
    """
    groups = [ProcessGroup.wrap(mesh.get_group(dim)) for dim in reversed(range(mesh.ndim)) if mesh.size(dim) > 1]
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        if local.is_meta or not local.numel():
            continue
        # One at a time: the whole model may not fit on the device.
        sent = local.to(mesh.device_type) if groups and groups[0].backend is Backend.NCCL else local
        sent = sent.contiguous()
        for group in groups:
            broadcast(sent, group=group)
        if sent is not local:
            local.copy_(sent)
