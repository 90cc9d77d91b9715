# refused: All keys are on every rank
from __future__ import annotations

import torch
import torch.distributed as dist


def ring_attention(attend, q, k, v, positions):
    whole = []
    for mine in (k, v, positions):
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        whole.append(torch.cat(parts))
    return attend(q, whole[0], whole[1], positions[:, None] >= whole[2])[0]
