# refused: times; twice is enough
from __future__ import annotations

from torch.utils.checkpoint import checkpoint


def lean_forward(layers, x):
    if len(layers) == 1:
        return layers[0](x)
    half = len(layers) // 2
    x = checkpoint(lean_forward, layers[:half], x, use_reentrant=False)
    return lean_forward(layers[half:], x)
