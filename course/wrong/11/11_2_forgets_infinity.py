# refused: the last rank's loss is inf
from __future__ import annotations

import torch
import torch.distributed as dist


def safe_step(loss, model, optimizer):
    is_bad = loss.detach().isnan().double()
    dist.all_reduce(is_bad)
    if is_bad:
        return False
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
    return True
