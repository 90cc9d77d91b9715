"""DDP communication hooks that replace the plain all_reduce: compression and hierarchical averaging."""

from __future__ import annotations

from axon_nb.parallel.hooks.base import CommHook, HookStats
from axon_nb.parallel.hooks.casts import BF16, FP16
from axon_nb.parallel.hooks.hierarchical import Hierarchical
from axon_nb.parallel.hooks.low_rank import PowerSGD
from axon_nb.parallel.hooks.top_k import TopK

__all__ = ["BF16", "FP16", "CommHook", "Hierarchical", "HookStats", "PowerSGD", "TopK"]
