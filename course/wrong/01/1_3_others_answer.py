# refused: It has nothing to say
from __future__ import annotations

import torch.distributed as dist


def sum_among(value, members):
    group = dist.new_group(members)
    if dist.get_rank() in members:
        dist.all_reduce(value, group=group)
    return value.item()
