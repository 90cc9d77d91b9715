"""Two numbers of a tensor, by which ranks tell whether they have the same one without moving it."""

from __future__ import annotations

import functools

import torch

_ELEMENTS = 4096
"""How many are looked at, evenly spaced."""


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum with changing signs, and a norm, of some of a tensor's elements: float64 of shape (2,).

    Rounding changes the sum by a tiny fraction of the norm; other values change it by about the norm.
    """
    flat = tensor.detach().reshape(-1)
    flat = flat[:: -(-flat.numel() // _ELEMENTS)].float() if flat.numel() else flat.new_zeros(1).float()
    return torch.stack([flat @ _signs(flat.numel(), flat.device), flat.norm()]).double()


@functools.lru_cache(maxsize=32)
def _signs(count: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(1, count + 1, device=device, dtype=torch.float32).cos_()


def differ(samples: torch.Tensor, *, tolerance: float) -> bool:
    """Whether samples of several ranks, one a row, differ by more than this fraction of the largest norm."""
    spread = samples.amax(0) - samples.amin(0)
    return bool(spread.max() > tolerance * samples[:, 1].max())
