# refused: still there when the next backward adds to them
from __future__ import annotations

import torch
import torch.distributed as dist


def safe_step(loss, model, optimizer):
    is_good = loss.detach().isfinite().double()
    dist.all_reduce(is_good, op=dist.ReduceOp.MIN)
    loss.backward()
    if not is_good:
        return False
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
    return True
