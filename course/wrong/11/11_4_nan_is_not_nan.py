# refused: compare the bytes of the numbers
from __future__ import annotations

import torch
import torch.distributed as dist


def who_differs(weights):
    everybody = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, weights)
    alike = [[bool((part == other).all()) for other in everybody].count(True) for part in everybody]
    return [rank for rank, count in enumerate(alike) if count != max(alike) or count == 0]
