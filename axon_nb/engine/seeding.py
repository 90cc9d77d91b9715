"""`%distributed seed` on a rank: Python's, NumPy's and torch's generators, on every device."""

from __future__ import annotations

import random

import numpy as np
import torch

from axon_nb.engine.session import current

__all__ = ["seed"]

_NUMPY_SEEDS = 1 << 32


def seed(value: int, *, per_rank: bool = False) -> int:
    """Seed this rank; with `per_rank` by the sum of `value` and the rank's number. Returns the seed."""
    own = value + current().config.rank if per_rank else value
    random.seed(own)
    np.random.seed(own % _NUMPY_SEEDS)
    torch.manual_seed(own)  # those of all devices, too
    return own
