# refused: Momentum is one more number
from __future__ import annotations

import torch


def states_bytes(model, optimizer):
    copies = 4 if isinstance(optimizer, torch.optim.Adam) else 2
    return sum((copies if weight.requires_grad else 1) * weight.nbytes for weight in model.parameters())
