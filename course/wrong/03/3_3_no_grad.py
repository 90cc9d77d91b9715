# refused: No gradient can get through
from __future__ import annotations

import torch


def lean_forward(layers, x):
    with torch.no_grad():
        for layer in layers[:-1]:
            x = layer(x)
    return layers[-1](x)
