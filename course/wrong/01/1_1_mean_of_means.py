# refused: the mean of the ranks' means
from __future__ import annotations

import torch.distributed as dist


def mean_loss(losses):
    mean = losses.mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()
