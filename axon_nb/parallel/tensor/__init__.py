"""Tensor parallelism: hand-written layers with sharded weights, and `parallelize` for ordinary models.

Use `parallelize` for your own models. The layers show how tensor parallelism works and match AxonML's.
"""

from __future__ import annotations

from axon_nb.parallel.tensor.functions import gather_sequence, parallel_cross_entropy, split_sequence
from axon_nb.parallel.tensor.layers import (
    ColumnParallelLinear,
    ParallelMLP,
    RowParallelLinear,
    SequenceParallelNorm,
    TensorParallelAttention,
    TensorParallelBlock,
)
from axon_nb.parallel.tensor.parallelize import ModuleReport, ParallelReport, parallelize

__all__ = [
    "ColumnParallelLinear",
    "ModuleReport",
    "ParallelMLP",
    "ParallelReport",
    "RowParallelLinear",
    "SequenceParallelNorm",
    "TensorParallelAttention",
    "TensorParallelBlock",
    "gather_sequence",
    "parallel_cross_entropy",
    "parallelize",
    "split_sequence",
]
