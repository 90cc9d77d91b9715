# refused: The ranks shuffle differently
from __future__ import annotations

import torch
import torch.distributed as dist


def my_share(length, epoch):
    n = dist.get_world_size()
    order = torch.randperm(length).tolist()
    order += order[: -length % n]
    return order[dist.get_rank() :: n]
