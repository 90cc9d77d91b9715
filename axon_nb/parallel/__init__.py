"""Parallel training on torch's own blocks: data, sharded and tensor parallelism, meshes, the loop, checkpoints."""

from __future__ import annotations

from axon_nb.parallel.batch_norm import SyncBatchNorm
from axon_nb.parallel.checkpoint import Checkpoints, ResumableSampler, Resumed, export_safetensors
from axon_nb.parallel.ddp import DDP, DistributedDataParallel
from axon_nb.parallel.fsdp import FSDP, CPUOffload, FullyShardedDataParallel
from axon_nb.parallel.hooks import BF16, FP16, CommHook, Hierarchical, HookStats, PowerSGD, TopK
from axon_nb.parallel.loop import accumulating, load_checkpoint, reduce_metrics, save_on_main
from axon_nb.parallel.memory import FSDPMemoryStats, ShardingStrategy, model_states
from axon_nb.parallel.mesh import axis_group, coordinates, make_mesh
from axon_nb.parallel.tensor import (
    ColumnParallelLinear,
    ParallelMLP,
    RowParallelLinear,
    TensorParallelAttention,
    TensorParallelBlock,
    parallel_cross_entropy,
    parallelize,
)

__all__ = [
    "BF16",
    "DDP",
    "FP16",
    "FSDP",
    "CPUOffload",
    "Checkpoints",
    "ColumnParallelLinear",
    "CommHook",
    "DistributedDataParallel",
    "FSDPMemoryStats",
    "FullyShardedDataParallel",
    "Hierarchical",
    "HookStats",
    "ParallelMLP",
    "PowerSGD",
    "ResumableSampler",
    "Resumed",
    "RowParallelLinear",
    "ShardingStrategy",
    "SyncBatchNorm",
    "TensorParallelAttention",
    "TensorParallelBlock",
    "TopK",
    "accumulating",
    "axis_group",
    "coordinates",
    "export_safetensors",
    "load_checkpoint",
    "make_mesh",
    "model_states",
    "parallel_cross_entropy",
    "parallelize",
    "reduce_metrics",
    "save_on_main",
]
