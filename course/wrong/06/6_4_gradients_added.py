# refused: as many times too large as there are ranks
from __future__ import annotations

import torch
import torch.distributed as dist


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def split_loss(logits, targets):
    words = logits.shape[1]
    place = targets - dist.get_rank() * words
    is_mine = (place >= 0) & (place < words)
    right = torch.where(is_mine, logits.gather(1, place.clamp(0, words - 1)[:, None])[:, 0], 0.0)
    largest = logits.detach().amax(1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    total = Sum.apply((logits - largest[:, None]).exp().sum(1))
    return (total.log() + largest - Sum.apply(right)).mean()
