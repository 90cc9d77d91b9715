"""Functions of torch.distributed that were renamed: what they are called in 2.13, found in older versions too."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["all_gather_single", "reduce_scatter_single"]

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""`all_gather_into_tensor` until torch 2.12."""
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""`reduce_scatter_tensor` until torch 2.12."""
