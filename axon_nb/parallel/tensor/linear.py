"""Linear layers that are cut over a group, along their output or their input features."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.comm.move import broadcast
from axon_nb.parallel.tensor.functions import (
    copy_to_ranks,
    gather_features,
    gather_sequence,
    scatter_sequence,
    split_features,
    sum_over_ranks,
)

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "own_part"]


def own_part(features: int, group: ProcessGroup, what: str) -> slice:
    """This rank's share of some features.

    Raises:
        TensorError: they cannot be divided equally; none is ever dropped.
    """
    if features % group.size():
        raise TensorError(
            f"{what}={features} over {group.size()} ranks: it must be a multiple of {group.size()}; "
            f"the next is {-(-features // group.size()) * group.size()}."
        )
    size = features // group.size()
    return slice(group.rank() * size, (group.rank() + 1) * size)


def _whole(in_features: int, out_features: int, bias: bool, group: ProcessGroup, kwargs: dict[str, Any]) -> nn.Linear:
    """One full layer, the same on all ranks; parts of it differ, where parts of one seed each would be the same."""
    layer = nn.Linear(in_features, out_features, bias=bias, **kwargs)
    with torch.no_grad():
        for parameter in layer.parameters():
            broadcast(parameter, group=group)
    return layer


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes a part of the output features.

    Args:
        in_features: Of the whole layer.
        out_features: Of the whole layer; a multiple of the group's size.
        bias: Whether there is one; cut like the output.
        gather_output: Every rank gets all features; otherwise its own part, for a `RowParallelLinear` after it.
        sequence: Each rank gets its own positions, (…, positions / ranks, in_features), and the layer gathers them.
        group: The ranks that share the layer; None: all.
        **kwargs: `device` and `dtype`, as for `nn.Linear`.

    Raises:
        TensorError: the output features cannot be divided equally.
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
        own_part(out_features, pg, "out_features")
        self._take(_whole(in_features, out_features, bias, pg, kwargs), pg, gather_output, sequence)

    def _take(self, whole: nn.Linear, group: ProcessGroup, gather_output: bool, sequence: bool) -> None:
        rows = own_part(whole.out_features, group, "out_features")
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.gather_output, self.sequence = gather_output, sequence
        self.group = group
        self.weight = nn.Parameter(whole.weight.detach()[rows].clone())
        bias: torch.Tensor | None = whole.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach()[rows].clone())

    @property
    def shard_dims(self) -> dict[str, int]:
        """The dimension along which each parameter is cut, of those that are parts."""
        return {"weight": 0} if self.bias is None else {"weight": 0, "bias": 0}

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, gather_output: bool = False, sequence: bool = False, group: GroupLike = None
    ) -> ColumnParallelLinear:
        """This rank's part of a layer that all ranks have."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._take(linear, resolve(group), gather_output, sequence)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in_features), the same on all ranks, to (…, out_features), or this rank's part of it."""
        out = self.own_features(gather_sequence(x, self.group) if self.sequence else copy_to_ranks(x, self.group))
        return gather_features(out, self.group) if self.gather_output else out

    def own_features(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's features, without communication: `x` has come through `copy_to_ranks` or `gather_sequence`."""
        return nn.functional.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """As `nn.Linear`, with the part that is here."""
        own = f"{self.weight.shape[0]} of {self.out_features}"
        return f"in_features={self.in_features}, out_features={own}, bias={self.bias is not None}"


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank has a part of the input features; the sum over ranks is its output.

    Args:
        in_features: Of the whole layer; a multiple of the group's size.
        out_features: Of the whole layer.
        bias: Whether there is one: on every rank the same, and added once, after the sum.
        input_is_parallel: Each rank gets its own part of the input features; otherwise all get all of them.
        sequence: Each rank has its own positions of the output, (…, positions / ranks, out_features).
        group: The ranks that share the layer; None: all.
        **kwargs: `device` and `dtype`, as for `nn.Linear`.

    Raises:
        TensorError: the input features cannot be divided equally.
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
        own_part(in_features, pg, "in_features")
        self._take(_whole(in_features, out_features, bias, pg, kwargs), pg, input_is_parallel, sequence)

    def _take(self, whole: nn.Linear, group: ProcessGroup, input_is_parallel: bool, sequence: bool) -> None:
        columns = own_part(whole.in_features, group, "in_features")
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.input_is_parallel, self.sequence = input_is_parallel, sequence
        self.group = group
        self.weight = nn.Parameter(whole.weight.detach()[:, columns].clone())
        bias: torch.Tensor | None = whole.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    @property
    def shard_dims(self) -> dict[str, int]:
        """The dimension along which each parameter is cut, of those that are parts."""
        return {"weight": 1}

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, input_is_parallel: bool = True, sequence: bool = False, group: GroupLike = None
    ) -> RowParallelLinear:
        """This rank's part of a layer that all ranks have."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._take(linear, resolve(group), input_is_parallel, sequence)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in_features / ranks), or (…, in_features) of all ranks, to (…, out_features), the same on all ranks."""
        own = x if self.input_is_parallel else split_features(x, self.group)
        part = nn.functional.linear(own, self.weight)
        out = scatter_sequence(part, self.group) if self.sequence else sum_over_ranks(part, self.group)
        if self.bias is None:
            return out
        # With own positions alone, a rank's gradient of the bias is a part of it.
        return out + (copy_to_ranks(self.bias, self.group) if self.sequence else self.bias)

    def extra_repr(self) -> str:
        """As `nn.Linear`, with the part that is here."""
        own = f"{self.weight.shape[1]} of {self.in_features}"
        return f"in_features={own}, out_features={self.out_features}, bias={self.bias is not None}"
