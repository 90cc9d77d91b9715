# refused: joined by a plain mean
from __future__ import annotations

import torch
import torch.distributed as dist


def ring_attention(attend, q, k, v, positions):
    rank, n = dist.get_rank(), dist.get_world_size()
    block, total = (k, v, positions), torch.zeros_like(q)
    for step in range(n):
        works = []
        if step < n - 1:
            incoming = tuple(torch.empty_like(tensor) for tensor in block)
            works = [dist.isend(tensor, (rank + 1) % n) for tensor in block]
            works += [dist.irecv(tensor, (rank - 1) % n) for tensor in incoming]
        total = total + attend(q, block[0], block[1], positions[:, None] >= block[2])[0] / n
        for work in works:
            work.wait()
        if works:
            block = incoming
    return total
