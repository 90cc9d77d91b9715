# refused: Whole tensors travel
from __future__ import annotations

import torch
import torch.distributed as dist


def ring_all_reduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    total, travelling = tensor.clone(), tensor.clone()
    for _ in range(n - 1):
        sending = dist.isend(travelling, (rank + 1) % n)
        incoming = torch.empty_like(tensor)
        dist.recv(incoming, (rank - 1) % n)
        sending.wait()
        total += incoming
        travelling = incoming
    return total
