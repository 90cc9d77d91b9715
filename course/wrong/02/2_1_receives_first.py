# refused: Everybody waits to receive
from __future__ import annotations

import torch
import torch.distributed as dist


def my_all_gather(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = [torch.empty_like(tensor) for _ in range(n)]
    rows[rank].copy_(tensor)
    for other in range(n):
        if other != rank:
            dist.recv(rows[other], other)
            dist.send(tensor, other)
    return torch.stack(rows)
