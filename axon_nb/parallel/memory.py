"""Memory of model states per rank, by formula and as measured: parameters, gradients and optimizer state.

The formula follows Rajbhandari et al., ZeRO (2020), and what torch does: FSDP2 shards a parameter along its first
dimension and pads parameters and gradients to equal sizes on all ranks; ZeroRedundancyOptimizer assigns whole
parameters to ranks. The measurement adds up the storages of a rank's tensors.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from axon_nb.errors import UsageError
from axon_nb.parallel.optimizer_kind import OptimizerKind, optimizer_states
from axon_nb.parallel.strategies import CPUOffload, ShardingStrategy

MIB = 1024.0 * 1024.0
"""Bytes per MiB, the unit of names that end in `_mb`."""
_ON_HOST = {
    CPUOffload.NONE: (),
    CPUOffload.PARAMS: ("params",),
    CPUOffload.OPTIMIZER_STATES: ("states",),
    CPUOffload.FULL: ("params", "grads", "states"),
}


@dataclass(frozen=True, slots=True)
class FSDPMemoryStats:
    """Bytes of model states on one rank, between steps."""

    total_params: int
    """Parameters of the whole model."""
    param_memory_bytes: int
    grad_memory_bytes: int
    optim_memory_bytes: int
    world_size: int
    unsharded_bytes: int
    """Bytes per rank without any sharding."""
    peak_memory_mb: float = math.nan
    """Peak use since the process started, in MiB: CUDA allocator, or resident memory on CPUs; NaN in estimates."""
    allocated_mb: float = math.nan
    """Memory in use by the CUDA allocator, including activations, in MiB; NaN in estimates and on CPUs."""
    host_bytes: int = 0
    """The part of the three that is offloaded to host memory."""

    @property
    def total_bytes(self) -> int:
        """Sum of parameters, gradients and optimizer state."""
        return self.param_memory_bytes + self.grad_memory_bytes + self.optim_memory_bytes

    @property
    def device_bytes(self) -> int:
        """`total_bytes` without what is offloaded to host memory."""
        return self.total_bytes - self.host_bytes

    def total_memory_mb(self) -> float:
        """Return `total_bytes` in MiB."""
        return self.total_bytes / MIB

    @property
    def current_allocation_mb(self) -> float:
        """Memory in use now, in MiB: by the CUDA allocator; in estimates and on CPUs, `total_memory_mb()`."""
        return self.total_memory_mb() if math.isnan(self.allocated_mb) else self.allocated_mb

    def memory_savings(self) -> float:
        """Return the fraction of bytes that sharding saves, 0 to 1, padding included."""
        return 1.0 - self.total_bytes / self.unsharded_bytes if self.unsharded_bytes else 0.0


def model_states(
    shapes: Iterable[tuple[tuple[int, ...], torch.dtype] | tuple[tuple[int, ...], torch.dtype, bool]],
    strategy: ShardingStrategy,
    *,
    world_size: int,
    shard_size: int | None = None,
    rank: int = 0,
    states_per_param: float | None = None,
    state_dtype: torch.dtype | None = None,
    optimizer: OptimizerKind | None = None,
    cpu_offload: CPUOffload = CPUOffload.NONE,
    owned: Collection[int] | None = None,
    device_type: str = "cuda",
) -> FSDPMemoryStats:
    """Estimate the model states on one rank.

    Args:
        shapes: Shape and dtype of each parameter, and optionally whether it is trained (default True).
        strategy: What is sharded.
        world_size: Number of ranks.
        shard_size: Ranks that share one copy; None means all. For HYBRID_SHARD: the ranks of a node.
        rank: Rank among those that share one copy; rank 0 always holds the most.
        states_per_param: Elements of optimizer state per parameter element: Adam 2, SGD 1 with momentum and 0 without.
            None: determined from `optimizer`.
        state_dtype: dtype of the optimizer state; None means that of the parameter.
        optimizer: The optimizer, used if `states_per_param` is None; None means Adam.
        cpu_offload: What is kept in host memory.
        owned: The parameters whose states are on this rank, for OPTIMIZER_STATE; None: see
            `partition_parameters`.
        device_type: The ranks' compute device; on ``cpu``, offloaded gradients stay in place, padding included.

    Raises:
        UsageError: `shard_size` is missing or does not divide `world_size`, or `rank` is out of range.
    """
    if strategy is ShardingStrategy.HYBRID_SHARD and shard_size is None:
        raise UsageError("HYBRID_SHARD needs shard_size, the number of ranks that share one copy.")
    num_shards = world_size if shard_size is None else shard_size
    if world_size % num_shards:
        raise UsageError(f"shard_size must divide world_size ({world_size}); got {num_shards}.")
    if not 0 <= rank < num_shards:
        raise UsageError(f"rank must be 0 to {num_shards - 1}, as {num_shards} ranks share one copy; got {rank}.")
    table = [(shape, dtype, trained[0] if trained else True) for shape, dtype, *trained in shapes]
    zero1 = strategy is ShardingStrategy.OPTIMIZER_STATE
    if zero1 and owned is None:
        owned = partition_parameters([math.prod(shape) for shape, _, _ in table], world_size)[rank]
    num_parts = 1 if zero1 or strategy is ShardingStrategy.NO_SHARD else num_shards
    kinds = {(dtype, trained) for _, dtype, trained in table}
    widths = {kind: _state_bytes(*kind, states_per_param, state_dtype, optimizer) for kind in kinds}
    copied = cpu_offload is CPUOffload.FULL and device_type != "cpu"  # without the padding
    params = grads = states = unsharded = 0
    for number, (shape, dtype, trained) in enumerate(table):
        elements = math.prod(shape)
        padded, held = _rows(shape, num_parts, rank if num_parts > 1 else 0)
        width = widths[dtype, trained]
        params += padded * dtype.itemsize
        grads += trained * (held if copied else padded) * dtype.itemsize
        states += round(held * width) if owned is None or number in owned else 0
        unsharded += (1 + trained) * elements * dtype.itemsize + round(elements * width)
    total = sum(math.prod(shape) for shape, _, _ in table)
    host = {
        CPUOffload.NONE: 0,
        CPUOffload.PARAMS: params,
        CPUOffload.OPTIMIZER_STATES: states,
        CPUOffload.FULL: params + grads + states,
    }
    return FSDPMemoryStats(total, params, grads, states, world_size, unsharded, host_bytes=host[cpu_offload])


def partition_parameters(sizes: Sequence[int], world_size: int) -> list[set[int]]:
    """Assign parameters to ranks as ZeroRedundancyOptimizer does: largest first, to the rank with the least so far.

    Args:
        sizes: Elements of each parameter, in the order of the optimizer's only parameter group.
        world_size: Number of ranks.

    Returns:
        For each rank, the indices of its parameters in `sizes`.
    """
    ranks: list[set[int]] = [set() for _ in range(world_size)]
    loads = [0] * world_size
    for number in sorted(range(len(sizes)), key=lambda index: sizes[index], reverse=True):
        least = loads.index(min(loads))
        ranks[least].add(number)
        loads[least] += sizes[number]
    return ranks


def _rows(shape: tuple[int, ...], num_parts: int, rank: int) -> tuple[int, int]:
    """Return the number of elements of one rank's shard: with padding, and without."""
    # As `torch.chunk`: equal parts of the first dimension, except for the last ones. A scalar counts as one row.
    rows = shape[0] if shape else 1
    if not rows:
        return 0, 0
    width = math.prod(shape) // rows
    step = -(-rows // num_parts)
    return step * width, max(0, min(rows, (rank + 1) * step) - rank * step) * width


def _state_bytes(
    dtype: torch.dtype,
    trained: bool,
    states_per_param: float | None,
    state_dtype: torch.dtype | None,
    optimizer: OptimizerKind | None,
) -> float:
    if states_per_param is None and state_dtype is None:
        return float((optimizer or OptimizerKind()).bytes_per_element(dtype, trained=trained))
    elements = 2.0 if states_per_param is None else states_per_param
    return trained * elements * (dtype if state_dtype is None else state_dtype).itemsize


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
    sizes = {role: sum(storage.nbytes() for storage in group) for role, group in storages.items()}
    if device.type == "cpu":
        host = sum(sizes[role] for role in _ON_HOST[cpu_offload])
    else:
        host = sum(item.nbytes() for group in storages.values() for item in group if item.device.type == "cpu")
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
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # The gradients of a unit are views into the output of one reduce-scatter.
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage
    return list(storages.values())


def _peak_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
