"""Self-attention with heads distributed over a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike, resolve
from axon_nb.parallel.tensor.functions import copy_to_ranks, gather_sequence
from axon_nb.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["TensorParallelAttention"]


class TensorParallelAttention(nn.Module):
    """Multi-head self-attention of which each rank computes some heads.

    Args:
        hidden: Features of the input and the output.
        heads: Number of heads, divisible by the group size; must divide `hidden`.
        causal: Whether each position attends only to itself and earlier ones.
        bias: Whether the projections have a bias.
        sequence: Input and output are this rank's positions, (…, positions / ranks, hidden).
        group: The ranks that share the heads; None means all.
        **kwargs: `device` and `dtype`.

    Raises:
        TensorError: `heads` is not divisible by the group size, or `hidden` by `heads`.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        causal: bool = False,
        bias: bool = True,
        sequence: bool = False,
        group: GroupLike = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        pg = resolve(group)
        if hidden % heads:
            raise TensorError(f"hidden must be divisible by heads ({heads}); got {hidden}.")
        if heads % pg.size():
            raise TensorError(f"heads must be divisible by the group size ({pg.size()}); got {heads}.")
        self.heads, self.causal = heads // pg.size(), causal
        self.group, self.sequence = pg, sequence
        self.query, self.key, self.value = (
            ColumnParallelLinear(hidden, hidden, bias=bias, group=pg, **kwargs) for _ in range(3)
        )
        self.out = RowParallelLinear(hidden, hidden, bias=bias, sequence=sequence, group=pg, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a replicated (…, positions, hidden) to (…, positions, hidden)."""
        # Once for all three projections: a single collective in backward.
        x = gather_sequence(x, self.group) if self.sequence else copy_to_ranks(x, self.group)

        def split(part: torch.Tensor) -> torch.Tensor:
            return part.reshape(*part.shape[:-1], self.heads, -1).transpose(-3, -2)

        attended = nn.functional.scaled_dot_product_attention(
            split(self.query.local_features(x)),
            split(self.key.local_features(x)),
            split(self.value.local_features(x)),
            is_causal=self.causal,
        )
        result: torch.Tensor = self.out(attended.transpose(-3, -2).flatten(-2))
        return result
