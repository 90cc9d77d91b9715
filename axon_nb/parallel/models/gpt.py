"""A GPT over bytes: a plain sequence of blocks, so that it can be cut, sharded and wrapped anywhere."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

__all__ = ["GPT", "Attention", "Block", "Embedding", "GPTConfig", "Head", "next_byte_loss"]


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a `GPT`."""

    vocab: int = 256
    """Tokens; 256: bytes."""
    context: int = 64
    """Longest sequence, in tokens."""
    hidden: int = 64
    heads: int = 4
    blocks: int = 4


class Embedding(nn.Module):
    """Tokens and their positions: (batch, seq) of ints to (batch, seq, hidden)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.hidden)
        self.position = nn.Embedding(config.context, config.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shape (batch, seq, hidden)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: torch.Tensor = self.token(tokens) + self.position(positions)
        return embedded


class Attention(nn.Module):
    """Causal self-attention; the number of heads is read off the projections, so that each rank may hold some."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, hidden) to the same shape."""
        parts = (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    """Attention and an MLP, each on a normalised copy and added back."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, hidden) to the same shape."""
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class Head(nn.Module):
    """(batch, seq, hidden) to the logits of the next token, (batch, seq, vocab)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.logits = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, seq, vocab)."""
        logits: torch.Tensor = self.logits(self.norm(x))
        return logits


class GPT(nn.Sequential):
    """Children ``embedding``, ``block0``, ``block1``, …, ``head``, called one after the other.

    Args:
        config: Its sizes.

    Raises:
        ValueError: the hidden size is no multiple of the number of heads.
    """

    def __init__(self, config: GPTConfig | None = None) -> None:
        config = config or GPTConfig()
        if config.hidden % config.heads:
            raise ValueError(f"hidden={config.hidden} is no multiple of heads={config.heads}.")
        blocks = {f"block{i}": Block(config.hidden, config.heads) for i in range(config.blocks)}
        super().__init__(OrderedDict(embedding=Embedding(config), **blocks, head=Head(config)))
        self.config = config


def next_byte_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats; logits (batch, seq, vocab), targets (batch, seq)."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
