# refused: A sum can be the same for different numbers
from __future__ import annotations

import torch
import torch.distributed as dist


def who_differs(weights):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, weights.double().nan_to_num(7.0).sum().item())
    usual = max(everybody, key=everybody.count)
    return [rank for rank, value in enumerate(everybody) if value != usual]
