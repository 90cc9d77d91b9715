# refused: It returns None
from __future__ import annotations

import torch
import torch.distributed as dist


def mean_loss(losses):
    sum_and_count = torch.tensor([losses.sum().item(), len(losses)])
    return dist.all_reduce(sum_and_count)
