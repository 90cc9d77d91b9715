# refused: did not come, and the others wait
from __future__ import annotations

import torch
import torch.distributed as dist


def clip(cut, whole, limit):
    squares = sum((gradient.square().sum() for gradient in cut), torch.zeros((), dtype=torch.float64))
    if cut:
        dist.all_reduce(squares)
    squares = sum((gradient.square().sum() for gradient in whole), squares)
    length = squares.sqrt().item()
    if length > limit:
        for gradient in (*cut, *whole):
            gradient.mul_(limit / length)
    return length
