# refused: only what came through this rank
from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F


def split_mlp(x, up, up_bias, down, down_bias):
    total = F.linear(F.gelu(F.linear(x, up, up_bias)), down)
    dist.all_reduce(total.detach())
    return total + down_bias
