"""A transformer block with weights sharded over a group."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from axon_nb.comm.group import GroupLike, resolve
from axon_nb.parallel.tensor.attention import TensorParallelAttention
from axon_nb.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from axon_nb.parallel.tensor.norm import SequenceParallelNorm

__all__ = ["ParallelMLP", "TensorParallelBlock"]


class ParallelMLP(nn.Module):
    """Two linear layers with GELU between: one all_reduce in forward, one in backward.

    Args:
        hidden: Features of the input and the output.
        inner: Features between the layers, divisible by the group size; None: 4 * hidden.
        sequence: Input and output are this rank's positions, (…, positions / ranks, hidden).
        group: The ranks that share the layers; None means all.
        **kwargs: `device` and `dtype`.
    """

    def __init__(
        self,
        hidden: int,
        inner: int | None = None,
        *,
        sequence: bool = False,
        group: GroupLike = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        pg = resolve(group)
        self.up = ColumnParallelLinear(hidden, inner or 4 * hidden, sequence=sequence, group=pg, **kwargs)
        self.down = RowParallelLinear(inner or 4 * hidden, hidden, sequence=sequence, group=pg, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, hidden) to (…, hidden)."""
        result: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return result


class TensorParallelBlock(nn.Module):
    """A pre-norm transformer block: attention and MLP, each with a residual. Norms are replicated on all ranks.

    Args:
        hidden: Features of the input and the output.
        heads: Number of heads.
        inner: Features within the MLP; None: 4 * hidden.
        causal: Whether each position attends only to itself and earlier ones.
        sequence: Input and output are this rank's positions, (…, positions / ranks, hidden), and so is everything that
            norms and residuals store for backward.
        group: The ranks that share the block; None means all.
        **kwargs: `device` and `dtype`.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        inner: int | None = None,
        causal: bool = False,
        sequence: bool = False,
        group: GroupLike = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        pg = resolve(group)
        norm = functools.partial(SequenceParallelNorm, group=pg) if sequence else nn.LayerNorm
        self.norm_1, self.norm_2 = norm(hidden, **kwargs), norm(hidden, **kwargs)
        kwargs |= {"sequence": sequence, "group": pg}
        self.attention = TensorParallelAttention(hidden, heads, causal=causal, **kwargs)
        self.mlp = ParallelMLP(hidden, inner, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, positions, hidden) to (…, positions, hidden)."""
        x = x + self.attention(self.norm_1(x))
        result: torch.Tensor = x + self.mlp(self.norm_2(x))
        return result
