"""A transformer layer as Megatron's, to compare with the published formulae of its activations."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional


def _dropout(x: torch.Tensor) -> torch.Tensor:
    # As on GPUs, with a mask of a byte an element; on CPUs `functional.dropout` keeps one of the input's dtype.
    return torch.native_dropout(x, 0.1, True)[0]


class Layer(nn.Module):
    """Attention with softmax and dropout written out, and an MLP with dropout, as in figure 2 of the paper.

    Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 4.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, hidden) to the same shape."""
        x = x + _dropout(self.out(self._attention(self.norm1(x))))
        inner = functional.gelu(self.up(self.norm2(x)))
        return x + _dropout(self.down(inner))

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mixed = _dropout(scores.softmax(-1)) @ v
        return mixed.transpose(1, 2).flatten(-2)


class Layers(nn.Sequential):
    """A stack of layers alone."""

    def __init__(self, hidden: int, heads: int, layers: int) -> None:
        super().__init__(*(Layer(hidden, heads) for _ in range(layers)))
