"""Small models for 8 x 8 images, and text to train on: the source of Python's standard library, as bytes."""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn


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
