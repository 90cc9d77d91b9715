# refused: rounded down
from __future__ import annotations

import torch.nn.functional as F


def within_capacity(choice, num_experts, factor):
    table = F.one_hot(choice, num_experts)
    return (table.cumsum(0) * table).sum(1) <= int(factor * len(choice) / num_experts)
