"""Differentiable collectives, in pairs: each one's backward is its partner's forward.

Shoeybi et al., Megatron-LM (2019), section 3: `f` is `copy_to_ranks`, `g` is `sum_over_ranks`.
"""

from __future__ import annotations

from typing import Any

import torch

from axon_nb.comm.collectives.movement import all_gather
from axon_nb.comm.collectives.reduction import all_reduce_sum, reduce_scatter_sum
from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import ProcessGroup

_SEQUENCE, _FEATURES = -2, -1
"""The dimensions of (…, positions, features)."""


class _Copy(torch.autograd.Function):
    """Forward: identity. Backward: sum of the gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce_sum(gradient.clone(memory_format=torch.contiguous_format), group=ctx.group), None


class _Sum(torch.autograd.Function):
    """Forward: sum over ranks. Backward: identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        total: torch.Tensor = all_reduce_sum(x.clone(memory_format=torch.contiguous_format), group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    """Forward: gather the parts of all ranks along a dimension. Backward: keep this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _local_chunk(gradient, ctx.group, ctx.dim), None, None


class _Split(torch.autograd.Function):
    """Forward: keep this rank's part along a dimension. Backward: gather the parts of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _local_chunk(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gather(gradient, ctx.group, ctx.dim), None, None


class _GatherSequence(torch.autograd.Function):
    """Forward: gather all positions. Backward: sum the gradients over ranks and keep this rank's positions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gather(x, group, _SEQUENCE)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduce_scatter(gradient, ctx.group), None


class _ScatterSequence(torch.autograd.Function):
    """Forward: sum over ranks and keep this rank's positions. Backward: gather all positions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(gradient, ctx.group, _SEQUENCE), None


def _gather(x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
    gathered: torch.Tensor = all_gather(x, dim=dim, group=group)
    return gathered.contiguous()


def _local_chunk(x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
    return x.chunk(group.size(), dim=dim)[group.rank()].contiguous()


def _reduce_scatter(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    _check_positions(x, group)
    part: torch.Tensor = reduce_scatter_sum(x.movedim(_SEQUENCE, 0).contiguous(), group=group)
    return part.movedim(0, _SEQUENCE).contiguous()


def _check_positions(x: torch.Tensor, group: ProcessGroup) -> None:
    if x.ndim < 2 or x.shape[_SEQUENCE] % group.size():
        raise TensorError(
            "sequence parallelism needs shape (…, positions, features), with positions divisible by the group size "
            f"({group.size()}); got shape {tuple(x.shape)}. Pad the sequence."
        )


def _apply(function: Any, *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result


def gather_sequence(x: torch.Tensor, group: ProcessGroup, *, replicated: bool = False) -> torch.Tensor:
    """Gather (…, positions / ranks, features) from each rank to (…, positions, features).

    Args:
        x: This rank's positions.
        group: The ranks that share the sequence.
        replicated: Whether what follows is the same on all ranks, such as a loss: each rank then keeps its part of the
            gradient. Otherwise each rank computes something different, such as its heads, and gradients are summed.
    """
    if replicated:
        return _apply(_Gather, x, group, _SEQUENCE)
    return _apply(_GatherSequence, x, group)


def scatter_sequence(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Sum (…, positions, features) over ranks; each rank keeps (…, positions / ranks, features)."""
    return _apply(_ScatterSequence, x, group)


def split_sequence(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Keep this rank's (…, positions / ranks, features) of a replicated (…, positions, features).

    Raises:
        TensorError: the positions are not divisible by the group size.
    """
    _check_positions(x, group)
    return _apply(_Split, x, group, _SEQUENCE)


def copy_to_ranks(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return the replicated `x` unchanged; its gradient is summed over ranks."""
    return _apply(_Copy, x, group)


def sum_over_ranks(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Sum over ranks; each rank's input gets the full gradient."""
    return _apply(_Sum, x, group)


def gather_features(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Gather (…, features / ranks) from each rank to (…, features)."""
    return _apply(_Gather, x, group, _FEATURES)


def split_features(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Keep this rank's (…, features / ranks) of a replicated (…, features)."""
    return _apply(_Split, x, group, _FEATURES)
