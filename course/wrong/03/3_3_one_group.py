# refused: computing all layers again
from __future__ import annotations

from torch.utils.checkpoint import checkpoint


def lean_forward(layers, x):
    def everything(y):
        for layer in layers:
            y = layer(y)
        return y

    return checkpoint(everything, x, use_reentrant=False)
