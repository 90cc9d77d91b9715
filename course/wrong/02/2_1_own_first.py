# refused: The order differs by rank
from __future__ import annotations

import torch
import torch.distributed as dist


def my_all_gather(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    sends = [dist.isend(tensor, (rank + step) % n) for step in range(1, n)]
    rows = [tensor]
    for step in range(1, n):
        row = torch.empty_like(tensor)
        dist.recv(row, (rank + step) % n)
        rows.append(row)
    for send in sends:
        send.wait()
    return torch.stack(rows)
