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

_SEQUENCE = -2
"""The dimension of positions in (…, positions, features)."""


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


class _Gather(torch.autograd.Function):
    """Forward all features, backward each rank's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        joined: torch.Tensor = all_gather(x, dim=-1, group=group)
        return joined.contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()].contiguous(), None


class _Split(torch.autograd.Function):
    """Forward each rank's own features, backward all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.chunk(group.size(), dim=-1)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        joined: torch.Tensor = all_gather(gradient, dim=-1, group=ctx.group)
        return joined.contiguous(), None


class _GatherSequence(torch.autograd.Function):
    """Forward all positions; backward the sum over ranks of the gradients, each rank's own positions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _joined(x, group)

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
        return _joined(gradient, ctx.group), None


class _SplitSequence(torch.autograd.Function):
    """Forward each rank's own positions; backward all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        _check_positions(x, group)
        return x.chunk(group.size(), dim=_SEQUENCE)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _joined(gradient, ctx.group), None


class _JoinSequence(torch.autograd.Function):
    """Forward all positions; backward each rank's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _joined(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.chunk(ctx.group.size(), dim=_SEQUENCE)[ctx.group.rank()].contiguous(), None


def _joined(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    whole: torch.Tensor = all_gather(x, dim=_SEQUENCE, group=group)
    return whole.contiguous()


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


def gather_sequence(x: torch.Tensor, group: ProcessGroup, *, replicated: bool = False) -> torch.Tensor:
    """(…, positions / ranks, features) of each rank to (…, positions, features).

    Args:
        x: This rank's positions.
        group: The ranks that share the sequence.
        replicated: What follows is the same on all ranks, such as a loss, so that each takes its part of the gradient;
            otherwise each computes something of its own, such as some of the heads, and gradients are summed.
    """
    function: Any = _JoinSequence if replicated else _GatherSequence
    result: torch.Tensor = function.apply(x, group)
    return result


def scatter_sequence(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum over ranks of (…, positions, features), of which each gets (…, positions / ranks, features)."""
    result: torch.Tensor = _ScatterSequence.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def split_sequence(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """(…, positions, features), which all ranks have, to this rank's (…, positions / ranks, features).

    Raises:
        TensorError: the positions cannot be divided equally.
    """
    result: torch.Tensor = _SplitSequence.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def copy_to_ranks(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """`x`, which all ranks have; its gradient is the sum of theirs."""
    result: torch.Tensor = _Copy.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def sum_over_ranks(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum over ranks; each rank's part gets the whole gradient."""
    result: torch.Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def gather_features(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """(…, features / ranks) of each rank to (…, features)."""
    result: torch.Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def split_features(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """(…, features), which all ranks have, to this rank's (…, features / ranks)."""
    result: torch.Tensor = _Split.apply(x, group)  # type: ignore[no-untyped-call]
    return result
