# refused: everything is kept
from __future__ import annotations


def lean_forward(layers, x):
    for layer in layers:
        x = layer(x)
    return x
