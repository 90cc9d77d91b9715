"""Collectives that gradients flow through, in pairs: what one does forward, its partner does backward.

Shoeybi et al., Megatron-LM (2019), section 3: `f` is `copy_to_ranks`, `g` is `sum_over_ranks`.
"""

from __future__ import annotations

from typing import Any

import torch

from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.move import all_gather
from axon_nb.comm.reduce import all_reduce_sum, reduce_scatter_sum

__all__ = [
    "copy_to_ranks",
    "gather_features",
    "gather_sequence",
    "scatter_sequence",
    "split_features",
    "split_sequence",
    "sum_over_ranks",
]

_SEQUENCE, _FEATURES = -2, -1
"""The dimensions of (…, positions, features)."""


class _Copy(torch.autograd.Function):
    """Forward the same on all ranks, backward the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce_sum(gradient.clone(memory_format=torch.contiguous_format), group=ctx.group), None


class _Sum(torch.autograd.Function):
    """Forward the sum over ranks, backward the same for all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        total: torch.Tensor = all_reduce_sum(x.clone(memory_format=torch.contiguous_format), group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Join(torch.autograd.Function):
    """Forward the parts of all ranks, joined along a dimension; backward each rank's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _joined(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _own(gradient, ctx.group, ctx.dim), None, None


class _Split(torch.autograd.Function):
    """Forward each rank's own part along a dimension; backward those of all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _own(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _joined(gradient, ctx.group, ctx.dim), None, None


class _GatherSequence(torch.autograd.Function):
    """Forward all positions; backward the sum over ranks of the gradients, each rank's own positions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _joined(x, group, _SEQUENCE)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradient, ctx.group), None


class _ScatterSequence(torch.autograd.Function):
    """Forward the sum over ranks, each rank's own positions; backward all positions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _joined(gradient, ctx.group, _SEQUENCE), None


def _joined(x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
    whole: torch.Tensor = all_gather(x, dim=dim, group=group)
    return whole.contiguous()


def _own(x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
    return x.chunk(group.size(), dim=dim)[group.rank()].contiguous()


def _summed(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    _check_positions(x, group)
    own: torch.Tensor = reduce_scatter_sum(x.movedim(_SEQUENCE, 0).contiguous(), group=group)
    return own.movedim(0, _SEQUENCE).contiguous()


def _check_positions(x: torch.Tensor, group: ProcessGroup) -> None:
    if x.ndim < 2 or x.shape[_SEQUENCE] % group.size():
        raise TensorError(
            f"a sequence of shape {tuple(x.shape)} over {group.size()} ranks: sequence parallelism takes (…, "
            f"positions, features) with a multiple of {group.size()} positions; pad the sequence."
        )


def _apply(function: Any, *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result


def gather_sequence(x: torch.Tensor, group: ProcessGroup, *, replicated: bool = False) -> torch.Tensor:
    """(…, positions / ranks, features) of each rank to (…, positions, features).

    Args:
        x: This rank's positions.
        group: The ranks that share the sequence.
        replicated: What follows is the same on all ranks, such as a loss, so that each takes its part of the gradient;
            otherwise each computes something of its own, such as some of the heads, and gradients are summed.
    """
    if replicated:
        return _apply(_Join, x, group, _SEQUENCE)
    return _apply(_GatherSequence, x, group)


def scatter_sequence(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum over ranks of (…, positions, features), of which each gets (…, positions / ranks, features)."""
    return _apply(_ScatterSequence, x, group)


def split_sequence(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """(…, positions, features), which all ranks have, to this rank's (…, positions / ranks, features).

    Raises:
        TensorError: the positions cannot be divided equally.
    """
    _check_positions(x, group)
    return _apply(_Split, x, group, _SEQUENCE)


def copy_to_ranks(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """`x`, which all ranks have; its gradient is the sum of theirs."""
    return _apply(_Copy, x, group)


def sum_over_ranks(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum over ranks; each rank's part gets the whole gradient."""
    return _apply(_Sum, x, group)


def gather_features(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """(…, features / ranks) of each rank to (…, features)."""
    return _apply(_Join, x, group, _FEATURES)


def split_features(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """(…, features), which all ranks have, to this rank's (…, features / ranks)."""
    return _apply(_Split, x, group, _FEATURES)
