# refused: the numbers of tokens are not
from __future__ import annotations

import torch
import torch.distributed as dist


def my_tokens(length):
    rank, n = dist.get_rank(), dist.get_world_size()
    first, last = (round(length * (place / n) ** 0.5) for place in (rank, rank + 1))
    return torch.arange(first, last)
