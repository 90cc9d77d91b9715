# refused: not yet divided by the number of samples
from __future__ import annotations

import torch.distributed as dist


def mean_loss(losses):
    total = losses.sum()
    dist.all_reduce(total)
    return total.item()
