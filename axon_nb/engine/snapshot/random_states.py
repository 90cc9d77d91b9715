"""The states of the generators that every library shares: Python's, NumPy's and torch's, on the CPU and the device."""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import torch

__all__ = ["random_states", "set_random_states"]


def random_states() -> dict[str, Any]:
    """Return the states of Python, torch, and of NumPy and the current CUDA device if they are in use."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Restore what `random_states` returned."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        numpy = importlib.import_module("numpy")
        numpy.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
