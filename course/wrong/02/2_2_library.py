# refused: called all_reduce
from __future__ import annotations

import torch
import torch.distributed as dist


def ring_all_reduce(tensor):
    dist.all_reduce(tensor)
    return tensor
