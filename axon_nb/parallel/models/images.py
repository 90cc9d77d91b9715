"""Two classifiers for small images, such as scikit-learn's 8 x 8 digits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["CNN", "MLP"]


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
