# refused: all that a layer keeps anyway
from __future__ import annotations

from torch.utils.checkpoint import checkpoint


def lean_forward(layers, x):
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x
