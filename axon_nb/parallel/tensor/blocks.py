"""Transformer blocks with weights sharded over a group: attention by heads, and layer norm for sequence parallelism."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike, resolve
from axon_nb.parallel.tensor.functions import copy_to_ranks, gather_sequence
from axon_nb.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear


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


class SequenceParallelNorm(nn.LayerNorm):
    """`nn.LayerNorm` on this rank's positions; gradients of its parameters are summed over ranks.

    Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 4.2.2.

    Args:
        features: Size of the last dimension.
        group: The ranks that share the sequence; None means all.
        **kwargs: Arguments of `nn.LayerNorm`.
    """

    def __init__(self, features: int, *, group: GroupLike = None, **kwargs: Any) -> None:
        super().__init__(features, **kwargs)
        self.group = resolve(group)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as nn.LayerNorm calls it
        """Normalise (…, positions / ranks, features)."""
        parameters: tuple[torch.Tensor | None, ...] = (self.weight, self.bias)
        weight, bias = (None if part is None else copy_to_ranks(part, self.group) for part in parameters)
        return nn.functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


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
