"""Models whose blocks look alike and may not be: random ones, and one for each way in which blocks can differ."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

WIDTH = 16
KINDS = ("plain", "periodic", "index", "hook", "skip", "buffer", "tail", "custom", "frozen", "first", "tied", "memory")
"""``plain`` and ``periodic`` blocks can be extrapolated; most others cannot."""


class Keep(torch.autograd.Function):
    """Saves copies of its input, as many as asked: what dispatch sees of its backward does not depend on them."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, copies: int) -> torch.Tensor:
        context.save_for_backward(*(x.clone() for _ in range(copies)))
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return gradient * 2, None


class Layer(nn.Module):
    """A block whose plain attributes decide what it computes."""

    def __init__(self, index: int, window: int) -> None:
        super().__init__()
        self.index, self.window, self.copies = index, window, 1
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to everything, or to nothing if there is a window."""
        inner = self.up(x).relu()
        if not self.window:
            scores = torch.softmax(x @ x.transpose(-1, -2), -1)
            inner = inner + scores @ inner
        return x + Keep.apply(self.down(inner), self.copies)


def _enlarge(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return torch.stack([output.exp() for _ in range(6)]).mean(0)


class Irregular(nn.Module):
    """Blocks in a row.

    Args:
        windows: Of each block.
        special: By block: in which way, one of `KINDS`, it differs.
    """

    def __init__(self, windows: tuple[int, ...], special: dict[int, str]) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(index, window) for index, window in enumerate(windows))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.special = special
        for index, kind in special.items():
            layer: Any = self.layers[index]
            if kind == "hook":
                layer.register_forward_hook(_enlarge)
            elif kind == "buffer":
                layer.register_buffer("table", torch.zeros(64, WIDTH))
            elif kind == "custom":
                layer.copies = 9
            elif kind == "frozen":
                layer.up.requires_grad_(requires_grad=False)
            elif kind == "tied":
                layer.up.weight = self.layers[index - 1].up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all blocks."""
        kinds = set(self.special.values())
        x = self.embedding(x)
        outputs = []
        for index, layer in enumerate(self.layers):
            if self.special.get(index) == "index":
                x = x + torch.cat([x, x, x], -1).exp().sum(-1, keepdim=True)
            if self.special.get(index) == "skip" and len(outputs) > 3:
                x = x + outputs[-4].exp()
            x = layer(x)
            if self.special.get(index) == "first":
                x = x * outputs[0] if outputs else x
            outputs.append(x)
        if "tail" in kinds:
            x = torch.stack([one * other for one in outputs for other in outputs]).sum(0)
        if "memory" in kinds:
            x = torch.stack(outputs).exp().mean(0)
        return self.head(x)


def random_model(seed: int) -> Callable[[], nn.Module]:
    """Return what makes a random model; every fourth seed has only plain blocks, or equal groups of them."""
    draw = random.Random(seed)
    period = draw.choice((1, 1, 2, 3))
    group = [draw.choice((0, 4)) for _ in range(period)]
    depth = draw.randrange(7, 10) * period + draw.randrange(period)
    windows = tuple(group[number % period] for number in range(depth))
    special: dict[int, str] = {}
    if seed % 4:
        kind = draw.choice(KINDS[2:])
        places = draw.choice((range(1, depth), range(1, depth, 2), [draw.randrange(1, depth)], [depth - 1]))
        special = dict.fromkeys(places, kind)
    return partial(Irregular, windows, special)
