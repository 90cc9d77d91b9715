"""Small, readable models for experiments: a byte-level GPT, an MLP and a CNN, and text to train the GPT on.

The GPT is a plain sequence of blocks, which can be split, sharded and wrapped anywhere. The other models take images of
8 x 8; the text is the source of Python's standard library, as bytes.
"""

from __future__ import annotations

import itertools
import sysconfig
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

__all__ = [
    "CNN",
    "GPT",
    "MLP",
    "Attention",
    "Block",
    "Embedding",
    "GPTConfig",
    "Head",
    "next_byte_loss",
    "standard_library",
    "windows",
]


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a `GPT`."""

    vocab: int = 256
    """Vocabulary size; 256 for bytes."""
    context: int = 64
    """Maximum sequence length, in tokens."""
    hidden: int = 64
    heads: int = 4
    blocks: int = 4


class Embedding(nn.Module):
    """Token and position embedding: integers (batch, seq) to (batch, seq, hidden)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.hidden)
        self.position = nn.Embedding(config.context, config.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings, shape (batch, seq, hidden)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: torch.Tensor = self.token(tokens) + self.position(positions)
        return embedded


class Attention(nn.Module):
    """Causal self-attention. The number of heads follows from the projections, so each rank can hold some of them."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, seq, hidden) to (batch, seq, hidden)."""
        parts = (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    """A pre-norm transformer block: attention and MLP, each with a residual."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, seq, hidden) to (batch, seq, hidden)."""
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class Head(nn.Module):
    """Output head: (batch, seq, hidden) to logits of the next token, (batch, seq, vocab)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.logits = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits, shape (batch, seq, vocab)."""
        logits: torch.Tensor = self.logits(self.norm(x))
        return logits


class GPT(nn.Sequential):
    """A sequence of the children ``embedding``, ``block0``, ``block1``, …, ``head``.

    Args:
        config: Sizes of the model.

    Raises:
        ValueError: `hidden` is not divisible by `heads`.
    """

    def __init__(self, config: GPTConfig | None = None) -> None:
        config = config or GPTConfig()
        if config.hidden % config.heads:
            raise ValueError(f"hidden must be divisible by heads ({config.heads}); got {config.hidden}.")
        blocks = {f"block{i}": Block(config.hidden, config.heads) for i in range(config.blocks)}
        super().__init__(OrderedDict(embedding=Embedding(config), **blocks, head=Head(config)))
        self.config = config


def next_byte_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute the mean cross-entropy in nats; logits (batch, seq, vocab), targets (batch, seq)."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class MLP(nn.Sequential):
    """Linear layers with GELU between; input (batch, sizes[0]) to logits (batch, sizes[-1])."""

    def __init__(self, sizes: Sequence[int] = (64, 128, 128, 10)) -> None:
        layers: list[nn.Module] = []
        for wide, next_wide in itertools.pairwise(sizes):
            layers += [nn.Linear(wide, next_wide), nn.GELU()]
        super().__init__(*layers[:-1])


class CNN(nn.Module):
    """Two convolutions and a linear layer; input (batch, 1, side, side) to logits (batch, classes)."""

    def __init__(self, side: int = 8, channels: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Linear(2 * channels * (side // 2) ** 2, classes)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return the logits, shape (batch, classes)."""
        logits: torch.Tensor = self.classify(self.features(pictures).flatten(1))
        return logits


def standard_library(num_bytes: int = 1 << 20) -> torch.Tensor:
    """Return the first bytes of the standard library's modules, sorted by name; shape (num_bytes,), uint8.

    Raises:
        ValueError: the standard library has less text than that.
    """
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= num_bytes:
            return torch.frombuffer(bytearray(b"".join(parts)[:num_bytes]), dtype=torch.uint8)
    raise ValueError(f"num_bytes must be at most {size}, the size of the standard library's modules; got {num_bytes}.")


def windows(
    text: torch.Tensor,
    *,
    batch: int,
    seq: int,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample random windows of a text, with the windows one byte later as targets.

    Args:
        text: Shape (n,), uint8, on the CPU.
        batch: Number of windows.
        seq: Bytes per window.
        generator: Random number generator on the CPU; None: torch's default.
        device: Where the windows are wanted; None: on the CPU.

    Returns:
        Inputs and targets, each of shape (batch, seq), int64.
    """
    starts = torch.randint(len(text) - seq, (batch, 1), generator=generator, device="cpu")
    index = starts + torch.arange(seq + 1, device="cpu")
    pieces = text[index].long().to(device)
    return pieces[:, :-1], pieces[:, 1:]
