"""Parallel training on torch's own building blocks: data parallelism and its communication hooks."""

from __future__ import annotations

from axon_nb.parallel.ddp import DDP, DistributedDataParallel
from axon_nb.parallel.hooks import BF16, FP16, CommHook, Hierarchical, HookStats, PowerSGD, TopK

__all__ = [
    "BF16",
    "DDP",
    "FP16",
    "CommHook",
    "DistributedDataParallel",
    "Hierarchical",
    "HookStats",
    "PowerSGD",
    "TopK",
]
