"""Small models and data for training tests, in double precision where results are compared."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """A residual block with names that tensor parallelism can be planned for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, width) to (batch, width)."""
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def blocks(count: int = 4, width: int = 8) -> nn.Sequential:
    """Return a model of equal blocks, with the same weights at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(*(Block(width) for _ in range(count))).double()


def batch(size: int = 8, width: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input and target, the same at every call."""
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(size, width, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    return (output - target).square().mean()


def reference_step(model: nn.Module | None = None, *, rate: float = 0.1) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and parameters after one step of SGD in a single process."""
    model = model or blocks()
    x, y = batch()
    loss = loss_of(model(x), y)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(rate * parameter.grad)
    return loss.item(), {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
