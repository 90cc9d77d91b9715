# refused: The gradients are missing
from __future__ import annotations

import torch


def states_bytes(model, optimizer):
    moments = 2 if isinstance(optimizer, torch.optim.Adam) else int(optimizer.defaults["momentum"] > 0)
    return sum(weight.nbytes * (1 + moments) for weight in model.parameters())
