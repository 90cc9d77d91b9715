"""The states of all random number generators that a training loop draws from."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch

__all__ = ["derive_rng", "rng_state", "set_rng_state"]


def rng_state() -> dict[str, Any]:
    """Those of Python, NumPy, torch, and of the current CUDA device where it is in use; plain values and tensors."""
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
    """Put all of them where `rng_state` found them."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def derive_rng(*, step: int, rank: int) -> None:
    """New states for a rank that has none: the same whenever the same step is resumed on the same rank."""
    seed = (step * 1_000_003 + rank * 7_919) % (1 << 32)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
