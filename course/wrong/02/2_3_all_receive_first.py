# refused: nobody is left to send
from __future__ import annotations

import torch
import torch.distributed as dist


def pass_right(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(tensor)
    dist.recv(arrived, (rank - 1) % n)
    dist.send(tensor, (rank + 1) % n)
    return arrived
