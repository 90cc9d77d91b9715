# refused: to learn one bit
from __future__ import annotations

import torch
import torch.distributed as dist


def who_differs(weights):
    everybody = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, weights)
    everybody = [part.numpy().tobytes() for part in everybody]
    usual = max(everybody, key=everybody.count)
    return [rank for rank, value in enumerate(everybody) if value != usual]
