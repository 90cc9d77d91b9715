# refused: counted once for each rank
from __future__ import annotations

import torch
import torch.distributed as dist


def clip(cut, whole, limit):
    squares = sum((gradient.square().sum() for gradient in (*cut, *whole)), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(squares)
    length = squares.sqrt().item()
    if length > limit:
        for gradient in (*cut, *whole):
            gradient.mul_(limit / length)
    return length
