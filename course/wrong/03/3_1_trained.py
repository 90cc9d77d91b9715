# refused: predict without training
from __future__ import annotations

import torch


def states_bytes(model, optimizer):
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    optimizer.step()
    states = [item for state in optimizer.state.values() for item in state.values()]
    kept = [item for item in states if isinstance(item, torch.Tensor) and item.dim()]
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return sum(tensor.nbytes for tensor in [*model.parameters(), *gradients, *kept])
