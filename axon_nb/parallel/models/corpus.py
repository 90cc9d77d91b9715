"""Real text that every Python has: the source of its standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

__all__ = ["standard_library", "windows"]


def standard_library(num_bytes: int = 1 << 20) -> torch.Tensor:
    """The first bytes of the standard library's modules, in the order of their names; shape (num_bytes,), uint8.

    Raises:
        ValueError: the library has less text than that.
    """
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= num_bytes:
            return torch.frombuffer(bytearray(b"".join(parts)[:num_bytes]), dtype=torch.uint8)
    raise ValueError(f"num_bytes={num_bytes}: the modules of the standard library have {size} bytes.")


def windows(
    text: torch.Tensor, *, batch: int, seq: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pieces of a text, and the same pieces one byte later.

    Args:
        text: Shape (n,), uint8.
        batch: Number of pieces.
        seq: Bytes of each.
        generator: What chooses; None: torch's own.

    Returns:
        Inputs and targets, each of shape (batch, seq), int64.
    """
    starts = torch.randint(len(text) - seq, (batch, 1), generator=generator)
    index = starts + torch.arange(seq + 1)
    pieces = text[index].long()
    return pieces[:, :-1], pieces[:, 1:]
