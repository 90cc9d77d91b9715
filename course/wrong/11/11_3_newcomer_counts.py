# refused: goes on at step -1
from __future__ import annotations

import torch
import torch.distributed as dist


def last_common(snapshots):
    newest = torch.tensor(max(snapshots, default=-1))
    dist.all_reduce(newest, op=dist.ReduceOp.MIN)
    return newest.item(), snapshots.get(newest.item())
