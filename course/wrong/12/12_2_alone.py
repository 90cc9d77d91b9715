# refused: Each rank has measured only what it holds
from __future__ import annotations

import torch


def clip(cut, whole, limit):
    gradients = [*cut, *whole]
    length = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    if length > limit:
        for gradient in gradients:
            gradient.mul_(limit / length)
    return length
