# refused: Lengths do not add up
from __future__ import annotations

import torch
import torch.distributed as dist


def clip(cut, whole, limit):
    total = sum((gradient.square().sum() for gradient in cut), torch.zeros((), dtype=torch.float64)).sqrt()
    dist.all_reduce(total)
    squares = sum((gradient.square().sum() for gradient in whole), total.square())
    length = squares.sqrt().item()
    if length > limit:
        for gradient in (*cut, *whole):
            gradient.mul_(limit / length)
    return length
