"""Self-attention whose heads are shared out over a group."""

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
    """Multi-head self-attention; each rank computes some of the heads.

    Args:
        hidden: Features of the input and the output.
        heads: Number of heads; a multiple of the group's size, and a divisor of `hidden`.
        causal: Whether a position sees only those up to itself.
        bias: Whether the projections have one.
        sequence: Input and output are each rank's own positions, (…, positions / ranks, hidden).
        group: The ranks that share it; None: all.
        **kwargs: `device` and `dtype`.

    Raises:
        TensorError: the heads cannot be shared out equally, or `hidden` is no multiple of them.
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
            raise TensorError(f"hidden={hidden} with {heads} heads: it must be a multiple of them.")
        if heads % pg.size():
            raise TensorError(
                f"{heads} heads over {pg.size()} ranks: each rank has as many, so it is a multiple of that."
            )
        self.heads, self.causal = heads // pg.size(), causal
        self.group, self.sequence = pg, sequence
        self.query, self.key, self.value = (
            ColumnParallelLinear(hidden, hidden, bias=bias, group=pg, **kwargs) for _ in range(3)
        )
        self.out = RowParallelLinear(hidden, hidden, bias=bias, sequence=sequence, group=pg, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, positions, hidden), the same on all ranks, to the same shape."""
        # Once for the three: one collective backward.
        x = gather_sequence(x, self.group) if self.sequence else copy_to_ranks(x, self.group)

        def split(part: torch.Tensor) -> torch.Tensor:
            return part.reshape(*part.shape[:-1], self.heads, -1).transpose(-3, -2)

        attended = nn.functional.scaled_dot_product_attention(
            split(self.query.own_features(x)),
            split(self.key.own_features(x)),
            split(self.value.own_features(x)),
            is_causal=self.causal,
        )
        result: torch.Tensor = self.out(attended.transpose(-3, -2).flatten(-2))
        return result
