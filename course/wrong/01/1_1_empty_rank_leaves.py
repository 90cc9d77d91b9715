# refused: does not come to the meeting
from __future__ import annotations

import torch
import torch.distributed as dist


def mean_loss(losses):
    if not len(losses):
        return None
    sum_and_count = torch.tensor([losses.sum().item(), len(losses)])
    dist.all_reduce(sum_and_count)
    return (sum_and_count[0] / sum_and_count[1]).item()
