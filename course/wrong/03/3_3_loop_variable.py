# refused: looks up the loop
from __future__ import annotations

from torch.utils.checkpoint import checkpoint


def lean_forward(layers, x):
    for first in range(0, len(layers), 4):

        def group(y):
            for layer in layers[first : first + 4]:  # noqa: B023 - the mistake
                y = layer(y)
            return y

        x = checkpoint(group, x, use_reentrant=False)
    return x
