# refused: the sum over all ranks
from __future__ import annotations

import torch.distributed as dist


def sum_among(value, members):
    dist.all_reduce(value)
    return value.item() if dist.get_rank() in members else None
