# refused: right is
from __future__ import annotations

import torch
import torch.distributed as dist


def average_gradients(model):
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
