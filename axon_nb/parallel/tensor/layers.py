"""Layers with weights sharded over a group: linear, along output or input features; attention by heads; layer norm."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from axon_nb.comm.collectives.movement import broadcast
from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.parallel.tensor.functions import (
    copy_to_ranks,
    gather_features,
    gather_sequence,
    scatter_sequence,
    split_features,
    sum_over_ranks,
)


def shard_slice(features: int, group: ProcessGroup, what: str) -> slice:
    """Return this rank's slice of the features.

    Raises:
        TensorError: the features are not divisible by the group size; none is ever dropped.
    """
    if features % group.size():
        raise TensorError(
            f"{what} must be divisible by the group size ({group.size()}); got {features}. The next multiple is "
            f"{-(-features // group.size()) * group.size()}."
        )
    size = features // group.size()
    return slice(group.rank() * size, (group.rank() + 1) * size)


def _full_linear(
    in_features: int, out_features: int, bias: bool, group: ProcessGroup, kwargs: dict[str, Any]
) -> nn.Linear:
    """Create one full layer, the same on all ranks: initializing shards with one seed would make them all equal."""
    layer = nn.Linear(in_features, out_features, bias=bias, **kwargs)
    with torch.no_grad():
        for parameter in layer.parameters():
            broadcast(parameter, group=group)
    return layer


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes a part of the output features.

    Args:
        in_features: Input features of the whole layer.
        out_features: Output features of the whole layer, divisible by the group size.
        bias: Whether to add a bias; it is sharded like the output.
        gather_output: Give every rank all features. Otherwise each gets its part, for a following `RowParallelLinear`.
        sequence: The input is this rank's positions, (…, positions / ranks, in_features); the layer gathers them.
        group: The ranks that share the layer; None means all.
        **kwargs: `device` and `dtype`, as for `nn.Linear`.

    Raises:
        TensorError: the output features are not divisible by the group size.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        gather_output: bool = False,
        sequence: bool = False,
        group: GroupLike = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        pg = resolve(group)
        shard_slice(out_features, pg, "out_features")
        self._init_shard(_full_linear(in_features, out_features, bias, pg, kwargs), pg, gather_output, sequence)

    def _init_shard(self, full: nn.Linear, group: ProcessGroup, gather_output: bool, sequence: bool) -> None:
        rows = shard_slice(full.out_features, group, "out_features")
        self.in_features, self.out_features = full.in_features, full.out_features
        self.gather_output, self.sequence = gather_output, sequence
        self.group = group
        self.weight = nn.Parameter(full.weight.detach()[rows].clone())
        bias: torch.Tensor | None = full.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach()[rows].clone())

    @property
    def shard_dims(self) -> dict[str, int]:
        """The dimension along which each sharded parameter is sharded."""
        return {"weight": 0} if self.bias is None else {"weight": 0, "bias": 0}

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, gather_output: bool = False, sequence: bool = False, group: GroupLike = None
    ) -> ColumnParallelLinear:
        """Create this rank's shard of a layer that all ranks have."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._init_shard(linear, resolve(group), gather_output, sequence)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a replicated (…, in_features) to (…, out_features), or to this rank's part of it."""
        out = self.local_features(gather_sequence(x, self.group) if self.sequence else copy_to_ranks(x, self.group))
        return gather_features(out, self.group) if self.gather_output else out

    def local_features(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's features without communication; use `copy_to_ranks` or `gather_sequence` on `x` first."""
        return nn.functional.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Describe the layer like `nn.Linear`, with the size of this rank's shard."""
        local = f"{self.weight.shape[0]} of {self.out_features}"
        return f"in_features={self.in_features}, out_features={local}, bias={self.bias is not None}"


class RowParallelLinear(nn.Module):
    """A linear layer with a part of the input features on each rank; its output is the sum over ranks.

    Args:
        in_features: Input features of the whole layer, divisible by the group size.
        out_features: Output features of the whole layer.
        bias: Whether to add a bias; it is replicated, and added once, after the sum.
        input_is_parallel: The input is this rank's part of the features; otherwise it is replicated.
        sequence: The output is this rank's positions, (…, positions / ranks, out_features).
        group: The ranks that share the layer; None means all.
        **kwargs: `device` and `dtype`, as for `nn.Linear`.

    Raises:
        TensorError: the input features are not divisible by the group size.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence: bool = False,
        group: GroupLike = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        pg = resolve(group)
        shard_slice(in_features, pg, "in_features")
        self._init_shard(_full_linear(in_features, out_features, bias, pg, kwargs), pg, input_is_parallel, sequence)

    def _init_shard(self, full: nn.Linear, group: ProcessGroup, input_is_parallel: bool, sequence: bool) -> None:
        columns = shard_slice(full.in_features, group, "in_features")
        self.in_features, self.out_features = full.in_features, full.out_features
        self.input_is_parallel, self.sequence = input_is_parallel, sequence
        self.group = group
        self.weight = nn.Parameter(full.weight.detach()[:, columns].clone())
        bias: torch.Tensor | None = full.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    @property
    def shard_dims(self) -> dict[str, int]:
        """The dimension along which each sharded parameter is sharded."""
        return {"weight": 1}

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, input_is_parallel: bool = True, sequence: bool = False, group: GroupLike = None
    ) -> RowParallelLinear:
        """Create this rank's shard of a layer that all ranks have."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._init_shard(linear, resolve(group), input_is_parallel, sequence)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, in_features / ranks), or a replicated (…, in_features), to a replicated (…, out_features)."""
        local = x if self.input_is_parallel else split_features(x, self.group)
        part = nn.functional.linear(local, self.weight)
        out = scatter_sequence(part, self.group) if self.sequence else sum_over_ranks(part, self.group)
        if self.bias is None:
            return out
        # With only its own positions, each rank computes only a part of the bias gradient.
        return out + (copy_to_ranks(self.bias, self.group) if self.sequence else self.bias)

    def extra_repr(self) -> str:
        """Describe the layer like `nn.Linear`, with the size of this rank's shard."""
        local = f"{self.weight.shape[1]} of {self.in_features}"
        return f"in_features={local}, out_features={self.out_features}, bias={self.bias is not None}"


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
