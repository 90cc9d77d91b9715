"""Cross-entropy of logits of which each rank has a part of the vocabulary: they are never gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.comm.reduce import all_reduce_max, all_reduce_sum

__all__ = ["parallel_cross_entropy"]


class _CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] of each row, from three small sums over ranks.

    Shoeybi et al., Megatron-LM (2019), section 3. Backward: softmax minus one at the target, of this rank's part.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, ignored: torch.Tensor, group: ProcessGroup
    ) -> torch.Tensor:
        # In float32 at least: rows are sums of many small terms.
        wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        wide = wide - all_reduce_max(wide.amax(-1), group=group).unsqueeze(-1)
        size = logits.shape[-1]
        local = targets - group.rank() * size
        mine = (local >= 0) & (local < size)
        local = local.where(mine, 0)
        chosen = wide.gather(-1, local.unsqueeze(-1)).squeeze(-1).where(mine, 0.0)
        exponents = wide.exp_()
        sums = torch.stack([exponents.sum(-1), chosen])
        total, at_target = all_reduce_sum(sums, group=group)
        softmax = exponents.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, local, mine, ignored)
        ctx.dtype = logits.dtype
        losses: torch.Tensor = (total.log() - at_target).masked_fill(ignored, 0.0)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        softmax, local, mine, ignored = ctx.saved_tensors
        own = softmax.clone()
        own.scatter_add_(-1, local.unsqueeze(-1), -mine.to(own.dtype).unsqueeze(-1))
        own *= gradient.masked_fill(ignored, 0.0).unsqueeze(-1)
        return own.to(ctx.dtype), None, None, None


def parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    group: GroupLike | Any = None,
) -> torch.Tensor:
    """Cross-entropy in nats, the same on all ranks: that of the whole logits; collective.

    Args:
        logits: Shape (…, vocabulary / ranks): this rank's part, as a column-parallel layer gives it.
        targets: Shape (…), integers that count within the whole vocabulary; the same on all ranks.
        ignore_index: Targets that count for nothing.
        reduction: ``mean``, ``sum`` or ``none``.
        group: The ranks that share the vocabulary; None: all.

    Returns:
        A number, or for ``none`` shape (…), in float32 or better.

    Raises:
        TensorError: shapes do not fit, targets are no integers or beyond the vocabulary; an unknown reduction.
    """
    pg = resolve(group)
    own = logits.to_local() if isinstance(logits, DTensor) else logits
    if own.shape[:-1] != targets.shape:
        raise TensorError(
            f"logits of shape {tuple(own.shape)} and targets of shape {tuple(targets.shape)}: logits have one "
            "dimension more, this rank's part of the vocabulary."
        )
    if targets.is_floating_point() or reduction not in ("mean", "sum", "none"):
        raise TensorError(f"targets of {targets.dtype}, reduction={reduction!r}: integers; 'mean', 'sum' or 'none'.")
    vocabulary = own.shape[-1] * pg.size()
    ignored = targets == ignore_index
    if bool(((targets < 0) | (targets >= vocabulary)).logical_and(~ignored).any()):
        raise TensorError(
            f"targets from {int(targets.min())} to {int(targets.max())}: the vocabulary has {vocabulary} entries, of "
            f"which this rank has {own.shape[-1]}."
        )
    losses: torch.Tensor = _CrossEntropy.apply(own, targets, ignored, pg)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()
