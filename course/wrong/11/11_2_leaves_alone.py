# refused: leaves alone, and the others wait for it
from __future__ import annotations

import torch
import torch.distributed as dist


def safe_step(loss, model, optimizer):
    if not loss.isfinite():
        return False
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
    return True
