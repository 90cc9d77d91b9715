"""Parallel training on torch's own building blocks: data and tensor parallelism, meshes, the loop."""

from __future__ import annotations

from axon_nb.parallel.ddp import DDP, DistributedDataParallel
from axon_nb.parallel.hooks import BF16, FP16, CommHook, Hierarchical, HookStats, PowerSGD, TopK
from axon_nb.parallel.loop import accumulating, load_checkpoint, reduce_metrics, save_on_main
from axon_nb.parallel.mesh import axis_group, coordinates, make_mesh
from axon_nb.parallel.tensor import (
    ColumnParallelLinear,
    ParallelMLP,
    RowParallelLinear,
    TensorParallelAttention,
    TensorParallelBlock,
)

__all__ = [
    "BF16",
    "DDP",
    "FP16",
    "ColumnParallelLinear",
    "CommHook",
    "DistributedDataParallel",
    "Hierarchical",
    "HookStats",
    "ParallelMLP",
    "PowerSGD",
    "RowParallelLinear",
    "TensorParallelAttention",
    "TensorParallelBlock",
    "TopK",
    "accumulating",
    "axis_group",
    "coordinates",
    "load_checkpoint",
    "make_mesh",
    "reduce_metrics",
    "save_on_main",
]
