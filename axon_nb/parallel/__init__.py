"""Parallel training on torch's own building blocks: data parallelism, its communication hooks, the training loop."""

from __future__ import annotations

from axon_nb.parallel.batch_norm import SyncBatchNorm
from axon_nb.parallel.ddp import DDP, DistributedDataParallel
from axon_nb.parallel.hooks import BF16, FP16, CommHook, Hierarchical, HookStats, PowerSGD, TopK
from axon_nb.parallel.loop import accumulating, load_checkpoint, reduce_metrics, save_on_main

__all__ = [
    "BF16",
    "DDP",
    "FP16",
    "CommHook",
    "DistributedDataParallel",
    "Hierarchical",
    "HookStats",
    "PowerSGD",
    "SyncBatchNorm",
    "TopK",
    "accumulating",
    "load_checkpoint",
    "reduce_metrics",
    "save_on_main",
]
