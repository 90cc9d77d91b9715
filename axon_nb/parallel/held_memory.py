"""What model states a rank holds, measured: the storages of its tensors."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from axon_nb.parallel.memory import MB, FSDPMemoryStats
from axon_nb.parallel.optimizer_state import held_states
from axon_nb.parallel.strategies import CPUOffload

__all__ = ["measured"]

_ON_HOST = {
    CPUOffload.NONE: (),
    CPUOffload.PARAMS: ("params",),
    CPUOffload.OPTIMIZER_STATES: ("states",),
    CPUOffload.FULL: ("params", "grads", "states"),
}


def measured(
    parameters: Iterable[torch.Tensor],
    optimizer: Optimizer | None,
    *,
    estimate: FSDPMemoryStats,
    offload: CPUOffload,
    device: torch.device,
) -> FSDPMemoryStats:
    """The bytes of these tensors on this rank, now.

    Args:
        parameters: Of the model; their gradients are counted with them.
        optimizer: Whose states; None: none.
        estimate: Of the same model: what is no measure is taken from it.
        offload: What is on the host: only asked on CPU ranks, where all is.
        device: What the rank computes on.
    """
    held = list(parameters)
    storages = {
        "params": _storages(held),
        "grads": _storages([parameter.grad for parameter in held if parameter.grad is not None]),
        "states": _storages(held_states(optimizer)),
    }
    sizes = {role: sum(storage.nbytes() for storage in found) for role, found in storages.items()}
    if device.type == "cpu":
        host = sum(sizes[role] for role in _ON_HOST[offload])
    else:
        host = sum(item.nbytes() for found in storages.values() for item in found if item.device.type == "cpu")
    return replace(
        estimate,
        param_memory_bytes=sizes["params"],
        grad_memory_bytes=sizes["grads"],
        optim_memory_bytes=sizes["states"],
        host_bytes=host,
        peak_memory_mb=_peak_mb(device),
        allocated_mb=torch.cuda.memory_allocated(device) / MB if device.type == "cuda" else math.nan,
    )


def _storages(tensors: Iterable[Any]) -> list[torch.UntypedStorage]:
    found = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # The gradients of a unit are views into what one reduce-scatter gave.
        storage = local.untyped_storage()
        found[storage.data_ptr()] = storage
    return list(found.values())


def _peak_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
