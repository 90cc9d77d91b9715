# refused: All logits came to all ranks
from __future__ import annotations

import torch
import torch.distributed as dist


def split_loss(logits, targets):
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.detach())
    parts[dist.get_rank()] = logits
    return torch.nn.functional.cross_entropy(torch.cat(parts, 1), targets)
