# refused: are always enough
from __future__ import annotations

import torch
import torch.distributed as dist


def clip(cut, whole, limit):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, [gradient.tolist() for gradient in cut])
    squares = sum(torch.tensor(numbers, dtype=torch.float64).square().sum() for mine in everybody for numbers in mine)
    squares = sum((gradient.square().sum() for gradient in whole), squares)
    length = squares.sqrt().item()
    if length > limit:
        for gradient in (*cut, *whole):
            gradient.mul_(limit / length)
    return length
