"""The states of the random number generators that a training loop uses."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch

__all__ = ["derive_rng", "rng_state", "set_rng_state"]


def rng_state() -> dict[str, Any]:
    """Return the states of Python, NumPy, torch and, if in use, the current CUDA device, as plain values."""
    kind, keys, position, has_gauss, gauss = cast("tuple[str, Any, int, int, float]", np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the states returned by `rng_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def derive_rng(*, step: int, rank: int) -> None:
    """Seed a rank that has no saved state; deterministic for a given step and rank."""
    seed = (step * 1_000_003 + rank * 7_919) % (1 << 32)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
