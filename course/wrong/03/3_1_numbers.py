# refused: numbers, not bytes
from __future__ import annotations

import torch


def states_bytes(model, optimizer):
    total = 0
    for weight in model.parameters():
        total += 2 * weight.numel()
        if isinstance(optimizer, torch.optim.Adam):
            total += 2 * weight.numel()
        elif optimizer.defaults["momentum"]:
            total += weight.numel()
    return total
