# refused: travels between the two layers
from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(dist.get_world_size(), -1)[dist.get_rank()]


def split_mlp(x, up, up_bias, down, down_bias):
    hidden = Gather.apply(F.gelu(F.linear(Enter.apply(x), up, up_bias)))
    mine = hidden.chunk(dist.get_world_size(), -1)[dist.get_rank()]
    return Leave.apply(F.linear(mine, down)) + down_bias
