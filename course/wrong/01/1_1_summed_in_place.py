# refused: changed the losses
from __future__ import annotations

import torch
import torch.distributed as dist


def mean_loss(losses):
    count = torch.tensor(float(len(losses)))
    dist.all_reduce(count)
    total = losses.sum()
    dist.all_reduce(total)
    losses.zero_()
    return (total / count).item()
