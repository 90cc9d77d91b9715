# refused: has it once for each
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


def split_mlp(x, up, up_bias, down, down_bias):
    hidden = F.gelu(F.linear(Enter.apply(x), up, up_bias))
    return Leave.apply(F.linear(hidden, down, down_bias))
