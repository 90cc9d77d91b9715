"""A transformer block whose weights are cut over a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from axon_nb.comm.group import GroupLike, resolve
from axon_nb.parallel.tensor.attention import TensorParallelAttention
from axon_nb.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["ParallelMLP", "TensorParallelBlock"]


class ParallelMLP(nn.Module):
    """Two linear layers with GELU between: one all_reduce forward, one backward.

    Args:
        hidden: Features of the input and the output.
        inner: Features between the layers; a multiple of the group's size; None: 4 * hidden.
        group: The ranks that share it; None: all.
        **kwargs: `device` and `dtype`.
    """

    def __init__(self, hidden: int, inner: int | None = None, *, group: GroupLike = None, **kwargs: Any) -> None:
        super().__init__()
        pg = resolve(group)
        self.up = ColumnParallelLinear(hidden, inner or 4 * hidden, group=pg, **kwargs)
        self.down = RowParallelLinear(inner or 4 * hidden, hidden, group=pg, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, hidden) to the same shape."""
        result: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return result


class TensorParallelBlock(nn.Module):
    """A pre-norm transformer block: attention and MLP, each with a residual. Norms are whole on every rank.

    Args:
        hidden: Features of the input and the output.
        heads: Number of heads.
        inner: Features within the MLP; None: 4 * hidden.
        causal: Whether a position sees only those up to itself.
        group: The ranks that share it; None: all.
        **kwargs: `device` and `dtype`.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        inner: int | None = None,
        causal: bool = False,
        group: GroupLike = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        pg = resolve(group)
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden, **kwargs), nn.LayerNorm(hidden, **kwargs)
        self.attention = TensorParallelAttention(hidden, heads, causal=causal, group=pg, **kwargs)
        self.mlp = ParallelMLP(hidden, inner, group=pg, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, positions, hidden) to the same shape."""
        x = x + self.attention(self.norm_1(x))
        result: torch.Tensor = x + self.mlp(self.norm_2(x))
        return result
