# refused: These are the sums over ranks
from __future__ import annotations

import torch
import torch.distributed as dist


def average_gradients(model):
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)
