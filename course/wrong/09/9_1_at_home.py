# refused: The tokens stayed at home
from __future__ import annotations

import torch


def through_experts(x, choice, experts):
    mine = choice % len(experts)
    return torch.stack([experts[number](row) for row, number in zip(x, mine.tolist(), strict=True)])
