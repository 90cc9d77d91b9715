# refused: Picking out the
from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F


def gathered(mine):
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.contiguous())
    return torch.cat(parts)


def shared_out(whole):
    parts = [share.contiguous() for share in whole.chunk(dist.get_world_size())]
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts)
    return mine


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mine):
        return gathered(mine)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, whole):
        return shared_out(whole)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient)


def sequence_mlp(x, up, down):
    entered = Gather.apply(F.layer_norm(x, x.shape[-1:]))
    return x + ScatterSum.apply(F.gelu(entered @ up.T) @ down.T)
