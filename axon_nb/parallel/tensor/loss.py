"""Cross-entropy of logits sharded over the vocabulary, without gathering them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from axon_nb.comm.collectives.reduction import all_reduce_max, all_reduce_sum
from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve


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
