# refused: Not every number has 4 bytes
from __future__ import annotations

import torch


def states_bytes(model, optimizer):
    moments = 2 if isinstance(optimizer, torch.optim.Adam) else int(optimizer.defaults["momentum"] > 0)
    return sum(4 * weight.numel() * ((2 + moments) if weight.requires_grad else 1) for weight in model.parameters())
