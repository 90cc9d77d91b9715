# refused: nobody sees sample
from __future__ import annotations

import torch
import torch.distributed as dist


def my_share(length, epoch):
    n = dist.get_world_size()
    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()
    return order[: length // n * n][dist.get_rank() :: n]
