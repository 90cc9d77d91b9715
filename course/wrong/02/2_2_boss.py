# refused: One rank sends much more than the others
from __future__ import annotations

import torch
import torch.distributed as dist


def ring_all_reduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(tensor, 0)
        total = torch.empty_like(tensor)
        dist.recv(total, 0)
        return total
    total = tensor.clone()
    for other in range(1, n):
        incoming = torch.empty_like(tensor)
        dist.recv(incoming, other)
        total += incoming
    for other in range(1, n):
        dist.send(total, other)
    return total
