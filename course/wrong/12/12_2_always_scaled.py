# refused: stretched to the limit
from __future__ import annotations

import torch
import torch.distributed as dist


def clip(cut, whole, limit):
    squares = sum((gradient.square().sum() for gradient in cut), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(squares)
    squares = sum((gradient.square().sum() for gradient in whole), squares)
    length = squares.sqrt().item()
    for gradient in (*cut, *whole):
        gradient.mul_(limit / length)
    return length
