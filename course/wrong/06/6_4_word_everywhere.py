# refused: the right word of a token is on one rank
from __future__ import annotations

import torch
import torch.distributed as dist


def split_loss(logits, targets):
    right = logits.gather(1, targets[:, None] % logits.shape[1])[:, 0]
    mine = torch.stack([logits.logsumexp(1), right])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.detach())
    parts[dist.get_rank()] = mine
    sums, rights = torch.stack(parts).unbind(1)
    return (sums.logsumexp(0) - rights.sum(0)).mean()
