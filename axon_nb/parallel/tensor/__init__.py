"""Tensor parallelism: hand-written layers with sharded weights, and `parallelize` for ordinary models.

Use `parallelize` for your own models. The layers show how tensor parallelism works and match AxonML's.
"""

from __future__ import annotations

from axon_nb.parallel.tensor.blocks import (
    ParallelMLP,
    SequenceParallelNorm,
    TensorParallelAttention,
    TensorParallelBlock,
)
from axon_nb.parallel.tensor.functions import gather_sequence, split_sequence
from axon_nb.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from axon_nb.parallel.tensor.loss import parallel_cross_entropy
from axon_nb.parallel.tensor.parallelize import parallelize
from axon_nb.parallel.tensor.report import ModuleReport, ParallelReport

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
