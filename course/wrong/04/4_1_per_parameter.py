# refused: one call for all gradients is enough
from __future__ import annotations

import torch
import torch.distributed as dist


def average_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
