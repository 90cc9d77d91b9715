"""What model states take on each rank, by formula: parameters, gradients, optimizer state. Activations are not in it.

Rajbhandari et al., ZeRO (2020), with what torch does: FSDP2 cuts a parameter along its first dimension and pads
parameters and gradients so that all ranks hold equally much; ZeroRedundancyOptimizer deals out whole parameters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from axon_nb.comm.errors import CommError
from axon_nb.parallel.optimizer_state import OptimizerKind
from axon_nb.parallel.strategies import CPUOffload, ShardingStrategy

__all__ = ["MB", "FSDPMemoryStats", "deal_out", "model_states"]

MB = 1024.0 * 1024.0
"""Bytes; what is called `_mb` counts in them."""


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
    """What one rank would hold without any sharding."""
    peak_memory_mb: float = math.nan
    """Highest use since the process began, in MiB: of the CUDA allocator, on CPUs resident memory; NaN in estimates."""
    allocated_mb: float = math.nan
    """What the CUDA allocator has given out, in MiB, activations and all; NaN in estimates and on CPUs."""
    host_bytes: int = 0
    """Of all three, what offloading keeps in the host's memory."""

    @property
    def total_bytes(self) -> int:
        """All three."""
        return self.param_memory_bytes + self.grad_memory_bytes + self.optim_memory_bytes

    @property
    def device_bytes(self) -> int:
        """All three, without what offloading keeps in the host's memory."""
        return self.total_bytes - self.host_bytes

    def total_memory_mb(self) -> float:
        """All three, in MiB."""
        return self.total_bytes / MB

    @property
    def current_allocation_mb(self) -> float:
        """In use now, in MiB: by the CUDA allocator's count, and in estimates and on CPUs all three."""
        return self.total_memory_mb() if math.isnan(self.allocated_mb) else self.allocated_mb

    def memory_savings(self) -> float:
        """Share of the bytes that sharding saves, 0 to 1: computed from the bytes, padding included."""
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
    offload: CPUOffload = CPUOffload.NONE,
    owned: Collection[int] | None = None,
    device_type: str = "cuda",
) -> FSDPMemoryStats:
    """Model states on one rank.

    Args:
        shapes: Shape and dtype of each parameter, and whether it is trained (it is, when that is left out).
        strategy: What is sharded.
        world_size: Number of ranks.
        shard_size: Ranks that share one copy; None: all. HYBRID_SHARD: those of a node.
        rank: Which of those that share one copy: no other has more than rank 0.
        states_per_param: Elements of optimizer state a parameter element: Adam 2, SGD with momentum 1, without 0. None:
            as the optimizer says.
        state_dtype: dtype of the optimizer state; None: that of the parameter.
        optimizer: Asked when `states_per_param` is None; None: Adam.
        offload: What the host's memory keeps.
        owned: OPTIMIZER_STATE: which parameters' states are on this rank; None: as `deal_out` says.
        device_type: What the ranks compute on; on ``cpu`` gradients stay where they are, padding and all.

    Raises:
        CommError: shard_size does not divide world_size, or there is no such rank.
    """
    if strategy is ShardingStrategy.HYBRID_SHARD and shard_size is None:
        raise CommError("HYBRID_SHARD needs shard_size: how many ranks of a node share one copy.")
    cut = world_size if shard_size is None else shard_size
    if world_size % cut:
        raise CommError(f"shard_size={cut}: it must divide the {world_size} ranks.")
    if not 0 <= rank < cut:
        raise CommError(f"rank={rank}: {cut} ranks share a copy, 0 to {cut - 1}.")
    table = [(shape, dtype, trained[0] if trained else True) for shape, dtype, *trained in shapes]
    zero1 = strategy is ShardingStrategy.OPTIMIZER_STATE
    if zero1 and owned is None:
        owned = deal_out([math.prod(shape) for shape, _, _ in table], world_size)[rank]
    ways = 1 if zero1 or strategy is ShardingStrategy.NO_SHARD else cut
    kinds = {(dtype, trained) for _, dtype, trained in table}
    widths = {kind: _state_bytes(*kind, states_per_param, state_dtype, optimizer) for kind in kinds}
    copied = offload is CPUOffload.FULL and device_type != "cpu"  # without the padding
    params = grads = states = whole = 0
    for number, (shape, dtype, trained) in enumerate(table):
        elements = math.prod(shape)
        padded, own = _rows(shape, ways, rank if ways > 1 else 0)
        width = widths[dtype, trained]
        params += padded * dtype.itemsize
        grads += trained * (own if copied else padded) * dtype.itemsize
        states += round(own * width) if owned is None or number in owned else 0
        whole += (1 + trained) * elements * dtype.itemsize + round(elements * width)
    total = sum(math.prod(shape) for shape, _, _ in table)
    host = {
        CPUOffload.NONE: 0,
        CPUOffload.PARAMS: params,
        CPUOffload.OPTIMIZER_STATES: states,
        CPUOffload.FULL: params + grads + states,
    }
    return FSDPMemoryStats(total, params, grads, states, world_size, whole, host_bytes=host[offload])


def deal_out(sizes: Sequence[int], world_size: int) -> list[set[int]]:
    """Which parameters each rank's part of a ZeroRedundancyOptimizer has: the largest first, to whom has least so far.

    Args:
        sizes: Elements of each parameter, in the order of the optimizer's one group.
        world_size: Number of ranks.

    Returns:
        For each rank the places of its parameters in `sizes`.
    """
    ranks: list[set[int]] = [set() for _ in range(world_size)]
    loads = [0] * world_size
    for number in sorted(range(len(sizes)), key=lambda place: sizes[place], reverse=True):
        least = loads.index(min(loads))
        ranks[least].add(number)
        loads[least] += sizes[number]
    return ranks


def _rows(shape: tuple[int, ...], ways: int, rank: int) -> tuple[int, int]:
    """Elements of one rank's part: with the padding, and without."""
    # As `torch.chunk`: equal parts of the first dimension but for the last ones. A scalar counts as one row.
    rows = shape[0] if shape else 1
    if not rows:
        return 0, 0
    width = math.prod(shape) // rows
    step = -(-rows // ways)
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
