"""DDP communication hooks that replace the plain all_reduce: compression and hierarchical averaging."""

from __future__ import annotations

from axon_nb.parallel.hooks.base import CommHook, HookStats
from axon_nb.parallel.hooks.compression import BF16, FP16, Hierarchical, PowerSGD, TopK

__all__ = ["BF16", "FP16", "CommHook", "Hierarchical", "HookStats", "PowerSGD", "TopK"]
