"""Tensor parallelism by hand: layers whose weights are cut over a group, with the gradients of the whole layer."""

from __future__ import annotations

from axon_nb.parallel.tensor.attention import TensorParallelAttention
from axon_nb.parallel.tensor.block import ParallelMLP, TensorParallelBlock
from axon_nb.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "ParallelMLP",
    "RowParallelLinear",
    "TensorParallelAttention",
    "TensorParallelBlock",
]
