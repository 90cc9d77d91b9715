# refused: it keeps two
from __future__ import annotations

import torch


def states_bytes(model, optimizer):
    keeps = isinstance(optimizer, torch.optim.Adam) or optimizer.defaults["momentum"] > 0
    return sum(weight.nbytes * (3 if keeps else 2) for weight in model.parameters())
