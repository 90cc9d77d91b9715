"""Differentiable collectives, in pairs: the backward of each is its partner's forward; cross-entropy of sharded logits.

Shoeybi et al., Megatron-LM (2019), section 3: `f` is `copy_to_ranks`, `g` is `sum_over_ranks`. The logits are sharded
over the vocabulary and never gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from axon_nb.comm.collectives.movement import all_gather
from axon_nb.comm.collectives.reduction import all_reduce_max, all_reduce_sum, reduce_scatter_sum
from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve

_SEQUENCE, _FEATURES = -2, -1
"""The dimensions of (…, positions, features)."""


_Change = Callable[[torch.Tensor, ProcessGroup], torch.Tensor]


class _Paired(torch.autograd.Function):
    """Forward: a change of the tensor. Backward: that of its partner, of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, change: _Change, partner: _Change) -> torch.Tensor:
        ctx.group, ctx.partner = group, partner
        return change(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.partner(gradient, ctx.group), None, None, None


def _same(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    total: torch.Tensor = all_reduce_sum(x.clone(memory_format=torch.contiguous_format), group=group)
    return total


def _gather(x: torch.Tensor, group: ProcessGroup, *, dim: int) -> torch.Tensor:
    gathered: torch.Tensor = all_gather(x, dim=dim, group=group)
    return gathered.contiguous()


def _local_chunk(x: torch.Tensor, group: ProcessGroup, *, dim: int) -> torch.Tensor:
    return x.chunk(group.size(), dim=dim)[group.rank()].contiguous()


def _reduce_scatter(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    _check_positions(x, group)
    part: torch.Tensor = reduce_scatter_sum(x.movedim(_SEQUENCE, 0).contiguous(), group=group)
    return part.movedim(0, _SEQUENCE).contiguous()


_gather_positions, _gather_features = (functools.partial(_gather, dim=dim) for dim in (_SEQUENCE, _FEATURES))
_local_positions, _local_features = (functools.partial(_local_chunk, dim=dim) for dim in (_SEQUENCE, _FEATURES))


def _check_positions(x: torch.Tensor, group: ProcessGroup) -> None:
    if x.ndim < 2 or x.shape[_SEQUENCE] % group.size():
        raise TensorError(
            "sequence parallelism needs shape (…, positions, features), with positions divisible by the group size "
            f"({group.size()}); got shape {tuple(x.shape)}. Pad the sequence."
        )


def _apply(x: torch.Tensor, group: ProcessGroup, change: _Change, partner: _Change) -> torch.Tensor:
    result: torch.Tensor = _Paired.apply(x, group, change, partner)  # type: ignore[no-untyped-call]
    return result


def gather_sequence(x: torch.Tensor, group: ProcessGroup, *, replicated: bool = False) -> torch.Tensor:
    """Gather (…, positions / ranks, features) from each rank to (…, positions, features).

    Args:
        x: This rank's positions.
        group: The ranks that share the sequence.
        replicated: Whether what follows is the same on all ranks, such as a loss: each rank then keeps its part of the
            gradient. Otherwise each rank computes something different, such as its heads, and gradients are summed.
    """
    return _apply(x, group, _gather_positions, _local_positions if replicated else _reduce_scatter)


def scatter_sequence(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Sum (…, positions, features) over ranks; each rank keeps (…, positions / ranks, features)."""
    return _apply(x, group, _reduce_scatter, _gather_positions)


def split_sequence(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Keep this rank's (…, positions / ranks, features) of a replicated (…, positions, features).

    Raises:
        TensorError: the positions are not divisible by the group size.
    """
    _check_positions(x, group)
    return _apply(x, group, _local_positions, _gather_positions)


def copy_to_ranks(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return the replicated `x` unchanged; its gradient is summed over ranks."""
    return _apply(x, group, _same, _sum)


def sum_over_ranks(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Sum over ranks; each rank's input gets the full gradient."""
    return _apply(x, group, _sum, _same)


def gather_features(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Gather (…, features / ranks) from each rank to (…, features)."""
    return _apply(x, group, _gather_features, _local_features)


def split_features(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Keep this rank's (…, features / ranks) of a replicated (…, features)."""
    return _apply(x, group, _local_features, _gather_features)


class _CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] of each row, from small reductions over ranks.

    Shoeybi et al., Megatron-LM (2019), section 3. Backward: this rank's part of softmax minus one at the target.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, ignored: torch.Tensor, group: ProcessGroup
    ) -> torch.Tensor:
        # In float32 or wider: rows are sums of many small terms.
        wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        wide = wide - all_reduce_max(wide.amax(-1), group=group).unsqueeze(-1)
        size = logits.shape[-1]
        local = targets - group.rank() * size
        is_local = (local >= 0) & (local < size)
        local = local.where(is_local, 0)
        target_logits = wide.gather(-1, local.unsqueeze(-1)).squeeze(-1).where(is_local, 0.0)
        exponents = wide.exp_()
        sums = torch.stack([exponents.sum(-1), target_logits])
        total, at_target = all_reduce_sum(sums, group=group)
        softmax = exponents.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, local, is_local, ignored)
        ctx.dtype = logits.dtype
        losses: torch.Tensor = (total.log() - at_target).masked_fill(ignored, 0.0)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        softmax, local, is_local, ignored = ctx.saved_tensors
        grad = softmax.clone()
        grad.scatter_add_(-1, local.unsqueeze(-1), -is_local.to(grad.dtype).unsqueeze(-1))
        grad *= gradient.masked_fill(ignored, 0.0).unsqueeze(-1)
        return grad.to(ctx.dtype), None, None, None


def parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    group: GroupLike | Any = None,
) -> torch.Tensor:
    """Compute the cross-entropy in nats of the whole logits; the same on all ranks. Collective.

    Args:
        logits: Shape (…, vocabulary / ranks): this rank's part, as returned by a column-parallel layer.
        targets: Shape (…), integers in the whole vocabulary; the same on all ranks.
        ignore_index: Targets with this value are ignored.
        reduction: ``mean``, ``sum`` or ``none``.
        group: The ranks that share the vocabulary; None means all.

    Returns:
        A scalar, or shape (…) for ``none``, in float32 or wider.

    Raises:
        TensorError: shapes do not match, targets are not integers or out of range, or `reduction` is unknown.
    """
    pg = resolve(group)
    local_logits = logits.to_local() if isinstance(logits, DTensor) else logits
    if local_logits.shape[:-1] != targets.shape:
        raise TensorError(
            f"logits must have the shape of targets, {tuple(targets.shape)}, plus one dimension for this rank's part "
            f"of the vocabulary; got {tuple(local_logits.shape)}."
        )
    if targets.is_floating_point() or reduction not in ("mean", "sum", "none"):
        raise TensorError(
            f"targets must be integers and reduction 'mean', 'sum' or 'none'; got {targets.dtype} and {reduction!r}."
        )
    vocabulary = local_logits.shape[-1] * pg.size()
    ignored = targets == ignore_index
    if bool(((targets < 0) | (targets >= vocabulary)).logical_and(~ignored).any()):
        raise TensorError(
            f"targets must be 0 to {vocabulary - 1}, as this rank has {local_logits.shape[-1]} of {vocabulary} "
            f"logits; got {int(targets.min())} to {int(targets.max())}."
        )
    losses: torch.Tensor = _CrossEntropy.apply(local_logits, targets, ignored, pg)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()
