# refused: do not make the same calls
from __future__ import annotations

import torch
import torch.distributed as dist


def last_common(snapshots):
    if not snapshots:
        return 0, None
    newest = torch.tensor(max(snapshots))
    dist.all_reduce(newest, op=dist.ReduceOp.MIN)
    return newest.item(), snapshots[newest.item()]
