# refused: passed on what it had received
from __future__ import annotations

import torch
import torch.distributed as dist


def pass_right(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank % 2 == 0:
        dist.send(tensor, (rank + 1) % n)
        dist.recv(tensor, (rank - 1) % n)
    else:
        dist.recv(tensor, (rank - 1) % n)
        dist.send(tensor, (rank + 1) % n)
    return tensor
