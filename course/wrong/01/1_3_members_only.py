# refused: All ranks create a group together
from __future__ import annotations

import torch.distributed as dist


def sum_among(value, members):
    if dist.get_rank() in members:
        dist.all_reduce(value)
        return value.item()
