# refused: only ranks 1,3 called `new_group`
from __future__ import annotations

import torch.distributed as dist


def sum_among(value, members):
    if dist.get_rank() not in members:
        return None
    group = dist.new_group(members)
    dist.all_reduce(value, group=group)
    return value.item()
