# refused: The nan has travelled
from __future__ import annotations

import torch
import torch.distributed as dist


def safe_step(loss, model, optimizer):
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    is_good = bool(loss.isfinite())
    if is_good:
        optimizer.step()
    optimizer.zero_grad()
    return is_good
