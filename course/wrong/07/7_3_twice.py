# refused: is taken twice
from __future__ import annotations

import torch
import torch.distributed as dist


def my_tokens(length):
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = torch.arange(length).chunk(2 * n)
    return torch.cat([pieces[rank], pieces[2 * n - 2 - rank]])
