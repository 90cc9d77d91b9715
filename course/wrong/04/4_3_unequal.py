# refused: one waits for ever
from __future__ import annotations

import torch
import torch.distributed as dist


def my_share(length, epoch):
    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()
    return order[dist.get_rank() :: dist.get_world_size()]
