"""Training text that every Python installation has: the source of the standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

__all__ = ["standard_library", "windows"]


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
    text: torch.Tensor, *, batch: int, seq: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample random windows of a text, with the windows one byte later as targets.

    Args:
        text: Shape (n,), uint8.
        batch: Number of windows.
        seq: Bytes per window.
        generator: Random number generator; None: torch's default.

    Returns:
        Inputs and targets, each of shape (batch, seq), int64.
    """
    starts = torch.randint(len(text) - seq, (batch, 1), generator=generator)
    index = starts + torch.arange(seq + 1)
    pieces = text[index].long()
    return pieces[:, :-1], pieces[:, 1:]
