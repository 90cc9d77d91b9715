"""A block of a GPT with attention written out, as notebook 03 shows it."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional


class PlainBlock(nn.Module):
    """A block of a GPT: attention, then two linear layers. Shapes are (batch, context, hidden)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Mix each token with those before it."""
        parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])  # (batch, heads, context, context)
        future = torch.full(scores.shape[-2:], -math.inf, dtype=x.dtype, device=x.device).triu(1)
        weights = (scores + future).softmax(-1)
        return torch.as_tensor(self.out((weights @ value).transpose(1, 2).flatten(-2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, in the shape of its input."""
        x = x + self.attention(self.norm1(x))
        return x + torch.as_tensor(self.down(functional.gelu(self.up(self.norm2(x)))))
