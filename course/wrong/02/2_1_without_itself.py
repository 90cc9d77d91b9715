# refused: A rank's own row is empty
from __future__ import annotations

import torch
import torch.distributed as dist


def my_all_gather(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(n) if other != rank]
    sends = [dist.isend(tensor, other) for other in others]
    rows = torch.zeros(n, *tensor.shape, dtype=tensor.dtype)
    for other in others:
        dist.recv(rows[other], other)
    for send in sends:
        send.wait()
    return rows
