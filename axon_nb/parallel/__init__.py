"""Parallel training on torch's own building blocks: data, sharded, tensor and pipeline parallelism, checkpoints."""

from __future__ import annotations

from axon_nb.comm.placements import declare_placements
from axon_nb.parallel.batch_norm import SyncBatchNorm
from axon_nb.parallel.checkpoint import Checkpoints, ResumableSampler, Resumed, export_safetensors
from axon_nb.parallel.data.ddp import DDP, DistributedDataParallel
from axon_nb.parallel.data.sharded_model import FSDP, FullyShardedDataParallel, ZeRO1
from axon_nb.parallel.experts import ExpertLoad, Experts, expert_load
from axon_nb.parallel.hooks import BF16, FP16, CommHook, Hierarchical, HookStats, PowerSGD, TopK
from axon_nb.parallel.loop import (
    NonFiniteNormError,
    accumulating,
    clip_grad_norm,
    grad_norm,
    load_checkpoint,
    reduce_metrics,
    save_on_main,
)
from axon_nb.parallel.memory import (
    CPUOffload,
    FSDPMemoryStats,
    OptimizerKind,
    ShardingStrategy,
    checkpoint_blocks,
    model_states,
)
from axon_nb.parallel.muon import Muon
from axon_nb.parallel.pipeline import (
    Pipeline,
    PipelineMemoryStats,
    PipelineSchedule,
    PipelineStage,
    bubble_fraction,
    ideal_timeline,
)
from axon_nb.parallel.sequence import ContextParallel
from axon_nb.parallel.tensor import (
    ColumnParallelLinear,
    ParallelMLP,
    RowParallelLinear,
    TensorParallelAttention,
    TensorParallelBlock,
    parallel_cross_entropy,
    parallelize,
)
from axon_nb.parallel.three_d import Parallel3D, axis_group, coordinates, make_mesh

__all__ = [
    "BF16",
    "DDP",
    "FP16",
    "FSDP",
    "CPUOffload",
    "Checkpoints",
    "ColumnParallelLinear",
    "CommHook",
    "ContextParallel",
    "DistributedDataParallel",
    "ExpertLoad",
    "Experts",
    "FSDPMemoryStats",
    "FullyShardedDataParallel",
    "Hierarchical",
    "HookStats",
    "Muon",
    "NonFiniteNormError",
    "OptimizerKind",
    "Parallel3D",
    "ParallelMLP",
    "Pipeline",
    "PipelineMemoryStats",
    "PipelineSchedule",
    "PipelineStage",
    "PowerSGD",
    "ResumableSampler",
    "Resumed",
    "RowParallelLinear",
    "ShardingStrategy",
    "SyncBatchNorm",
    "TensorParallelAttention",
    "TensorParallelBlock",
    "TopK",
    "ZeRO1",
    "accumulating",
    "axis_group",
    "bubble_fraction",
    "checkpoint_blocks",
    "clip_grad_norm",
    "coordinates",
    "declare_placements",
    "expert_load",
    "export_safetensors",
    "grad_norm",
    "ideal_timeline",
    "load_checkpoint",
    "make_mesh",
    "model_states",
    "parallel_cross_entropy",
    "parallelize",
    "reduce_metrics",
    "save_on_main",
]
