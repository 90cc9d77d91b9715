# refused: drift apart
from __future__ import annotations

import torch
import torch.distributed as dist


def safe_step(loss, model, optimizer):
    is_good = loss.detach().isfinite().double()
    dist.all_reduce(is_good, op=dist.ReduceOp.MIN)
    if is_good:
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return bool(is_good)
