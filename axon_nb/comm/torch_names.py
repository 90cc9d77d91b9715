"""Functions that torch.distributed has renamed, under their current names."""

from __future__ import annotations

from typing import Any

from axon_nb.torch_api import torch_api

__all__ = ["all_gather_single", "reduce_scatter_single"]

all_gather_single: Any = torch_api().all_gather_single
reduce_scatter_single: Any = torch_api().reduce_scatter_single
