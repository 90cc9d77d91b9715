# refused: it must stay torch.bool
from __future__ import annotations

import math

import torch.nn.functional as F


def within_capacity(choice, num_experts, factor):
    seats = math.ceil(factor * len(choice) / num_experts)
    table = F.one_hot(choice, num_experts)
    return ((table.cumsum(0) * table).sum(1) <= seats).long()
