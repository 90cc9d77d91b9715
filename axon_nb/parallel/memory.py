"""What model states take on each rank, by formula: parameters, gradients, optimizer state. Activations are not in it.

Rajbhandari et al., ZeRO (2020), with what FSDP2 adds: a parameter is cut along its first dimension, and padded so that
all ranks hold equally much.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from axon_nb.comm.errors import CommError

__all__ = ["FSDPMemoryStats", "ShardingStrategy", "model_states"]

_MB = 1024.0 * 1024.0


class ShardingStrategy(enum.Enum):
    """What each rank keeps only its part of."""

    FULL_SHARD = "full_shard"
    """Parameters, gradients and optimizer state (ZeRO-3)."""
    SHARD_GRAD_OP = "shard_grad_op"
    """The same between steps; from forward to backward parameters stay whole (ZeRO-2)."""
    NO_SHARD = "no_shard"
    """Nothing: every rank has all, and gradients are averaged, as in DDP."""
    HYBRID_SHARD = "hybrid_shard"
    """As FULL_SHARD within a node; nodes have copies."""
    OPTIMIZER_STATE = "optimizer_state"
    """The optimizer state alone (ZeRO-1)."""


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

    @property
    def total_bytes(self) -> int:
        """All three."""
        return self.param_memory_bytes + self.grad_memory_bytes + self.optim_memory_bytes

    def total_memory_mb(self) -> float:
        """All three, in MiB."""
        return self.total_bytes / _MB

    @property
    def current_allocation_mb(self) -> float:
        """All three, in MiB."""
        return self.total_memory_mb()

    def memory_savings(self) -> float:
        """Share of the bytes that sharding saves, 0 to 1: computed from the bytes, padding included."""
        return 1.0 - self.total_bytes / self.unsharded_bytes if self.unsharded_bytes else 0.0


def model_states(
    shapes: Iterable[tuple[tuple[int, ...], torch.dtype]],
    strategy: ShardingStrategy,
    *,
    world_size: int,
    shard_size: int | None = None,
    states_per_param: float = 2.0,
    state_dtype: torch.dtype | None = None,
) -> FSDPMemoryStats:
    """Model states on one rank.

    Args:
        shapes: Shape and dtype of each parameter.
        strategy: What is sharded.
        world_size: Number of ranks.
        shard_size: Ranks that share one copy; None: all. HYBRID_SHARD: those of a node.
        states_per_param: Elements of optimizer state a parameter element: Adam 2, SGD with momentum 1, without 0.
        state_dtype: dtype of the optimizer state; None: that of the parameter.

    Raises:
        CommError: shard_size does not divide world_size.
    """
    if strategy is ShardingStrategy.HYBRID_SHARD and shard_size is None:
        raise CommError("HYBRID_SHARD needs shard_size: how many ranks of a node share one copy.")
    cut = world_size if shard_size is None else shard_size
    if world_size % cut:
        raise CommError(f"shard_size={cut}: it must divide the {world_size} ranks.")
    whole = strategy is ShardingStrategy.NO_SHARD
    params = grads = states = full = total = 0
    for shape, dtype in shapes:
        elements = math.prod(shape)
        width = dtype.itemsize if state_dtype is None else state_dtype.itemsize
        # dim 0 is cut into equal parts, the last ones padded; a scalar counts as one row.
        rows = shape[0] if shape else 1
        part = elements if whole or not rows else -(-rows // cut) * (elements // rows)
        kept = elements if strategy is ShardingStrategy.OPTIMIZER_STATE else part
        params += kept * dtype.itemsize
        grads += kept * dtype.itemsize
        states += round(part * states_per_param) * width
        full += 2 * elements * dtype.itemsize + round(elements * states_per_param) * width
        total += elements
    return FSDPMemoryStats(total, params, grads, states, world_size, full)
