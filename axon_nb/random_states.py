"""The states of the generators that every library shares: Python's, NumPy's and torch's, on the CPU and the device."""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """Return the states of Python, torch, and of NumPy and the current CUDA device if they are in use.

    They are numbers, tuples and tensors, which `torch.load` reads without running code.
    """
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state(legacy=True)
        states["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Restore what `random_states` returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        kind, keys, *rest = states["numpy"]
        importlib.import_module("numpy").random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
