"""Parallel training on torch's own building blocks: data, sharded and tensor parallelism, meshes, the loop."""

from __future__ import annotations

from axon_nb.parallel.batch_norm import SyncBatchNorm
from axon_nb.parallel.ddp import DDP, DistributedDataParallel
from axon_nb.parallel.fsdp import FSDP, CPUOffload, FullyShardedDataParallel
from axon_nb.parallel.hooks import BF16, FP16, CommHook, Hierarchical, HookStats, PowerSGD, TopK
from axon_nb.parallel.loop import accumulating, load_checkpoint, reduce_metrics, save_on_main
from axon_nb.parallel.memory import FSDPMemoryStats, ShardingStrategy, model_states
from axon_nb.parallel.mesh import axis_group, coordinates, make_mesh
from axon_nb.parallel.pipeline import (
    Pipeline,
    PipelineMemoryStats,
    PipelineSchedule,
    PipelineStage,
    bubble_fraction,
    ideal_timeline,
)
from axon_nb.parallel.tensor import (
    ColumnParallelLinear,
    ParallelMLP,
    RowParallelLinear,
    TensorParallelAttention,
    TensorParallelBlock,
)
from axon_nb.parallel.three_d import Parallel3D

__all__ = [
    "BF16",
    "DDP",
    "FP16",
    "FSDP",
    "CPUOffload",
    "ColumnParallelLinear",
    "CommHook",
    "DistributedDataParallel",
    "FSDPMemoryStats",
    "FullyShardedDataParallel",
    "Hierarchical",
    "HookStats",
    "Parallel3D",
    "ParallelMLP",
    "Pipeline",
    "PipelineMemoryStats",
    "PipelineSchedule",
    "PipelineStage",
    "PowerSGD",
    "RowParallelLinear",
    "ShardingStrategy",
    "SyncBatchNorm",
    "TensorParallelAttention",
    "TensorParallelBlock",
    "TopK",
    "accumulating",
    "axis_group",
    "bubble_fraction",
    "coordinates",
    "ideal_timeline",
    "load_checkpoint",
    "make_mesh",
    "model_states",
    "reduce_metrics",
    "save_on_main",
]
