# refused: called all_gather
from __future__ import annotations

import torch
import torch.distributed as dist


def my_all_gather(tensor):
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return torch.stack(rows)
