# refused: Each rank has subtracted its own maximum
from __future__ import annotations

import torch
import torch.distributed as dist


def split_loss(logits, targets):
    words = logits.shape[1]
    place = targets - dist.get_rank() * words
    is_mine = (place >= 0) & (place < words)
    right = torch.where(is_mine, logits.gather(1, place.clamp(0, words - 1)[:, None])[:, 0], 0.0)
    largest = logits.detach().amax(1)
    total = (logits - largest[:, None]).exp().sum(1)
    dist.all_reduce(total.detach())
    dist.all_reduce(right.detach())
    return (total.log() + largest - right).mean()
