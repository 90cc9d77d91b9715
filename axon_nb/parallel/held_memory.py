"""Measure the model states that a rank holds: the storages of its tensors."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from axon_nb.parallel.memory import MIB, FSDPMemoryStats
from axon_nb.parallel.optimizer_state import optimizer_states
from axon_nb.parallel.strategies import CPUOffload

__all__ = ["measure_model_states"]

_ON_HOST = {
    CPUOffload.NONE: (),
    CPUOffload.PARAMS: ("params",),
    CPUOffload.OPTIMIZER_STATES: ("states",),
    CPUOffload.FULL: ("params", "grads", "states"),
}


def measure_model_states(
    parameters: Iterable[torch.Tensor],
    optimizer: Optimizer | None,
    *,
    estimate: FSDPMemoryStats,
    cpu_offload: CPUOffload,
    device: torch.device,
) -> FSDPMemoryStats:
    """Measure the bytes of these tensors on this rank now.

    Args:
        parameters: The model's parameters; their gradients are included.
        optimizer: The optimizer whose states to measure; None: no states.
        estimate: The estimate for the same model; supplies the fields that are not measured.
        cpu_offload: What is offloaded; used on CPU ranks only, where everything is in host memory.
        device: The rank's compute device.
    """
    held = list(parameters)
    storages = {
        "params": _storages(held),
        "grads": _storages([parameter.grad for parameter in held if parameter.grad is not None]),
        "states": _storages(optimizer_states(optimizer)),
    }
    sizes = {role: sum(storage.nbytes() for storage in found) for role, found in storages.items()}
    if device.type == "cpu":
        host = sum(sizes[role] for role in _ON_HOST[cpu_offload])
    else:
        host = sum(item.nbytes() for found in storages.values() for item in found if item.device.type == "cpu")
    return replace(
        estimate,
        param_memory_bytes=sizes["params"],
        grad_memory_bytes=sizes["grads"],
        optim_memory_bytes=sizes["states"],
        host_bytes=host,
        peak_memory_mb=_peak_mb(device),
        allocated_mb=torch.cuda.memory_allocated(device) / MIB if device.type == "cuda" else math.nan,
    )


def _storages(tensors: Iterable[Any]) -> list[torch.UntypedStorage]:
    found = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # The gradients of a unit are views into the output of one reduce-scatter.
        storage = local.untyped_storage()
        found[storage.data_ptr()] = storage
    return list(found.values())


def _peak_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
