# refused: moments for plain SGD
from __future__ import annotations


def states_bytes(model, optimizer):
    return 4 * sum(weight.nbytes for weight in model.parameters())
