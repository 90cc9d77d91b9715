# refused: This is the mean
from __future__ import annotations

import torch
import torch.distributed as dist


def ring_all_reduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    size = -(-tensor.numel() // n)
    flat = torch.zeros(size * n, dtype=tensor.dtype)
    flat[: tensor.numel()] = tensor.flatten()
    parts = flat.chunk(n)
    incoming = torch.empty_like(parts[0])
    for step in range(n - 1):
        sending = dist.isend(parts[(rank - step) % n], (rank + 1) % n)
        dist.recv(incoming, (rank - 1) % n)
        sending.wait()
        parts[(rank - step - 1) % n].add_(incoming)
    for step in range(n - 1):
        sending = dist.isend(parts[(rank + 1 - step) % n], (rank + 1) % n)
        dist.recv(parts[(rank - step) % n], (rank - 1) % n)
        sending.wait()
    return flat[: tensor.numel()].view_as(tensor) / n
