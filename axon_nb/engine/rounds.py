"""Rounds of optimizer steps on this rank: a training step, however many optimizers it has."""

from __future__ import annotations

import time
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from axon_nb.records.pace import RateMeter

__all__ = ["install_rounds", "rounds"]

rounds = RateMeter()
"""How fast they come."""
_seen: set[int] = set()


def install_rounds() -> None:
    """Count from now on."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Any, *_: Any) -> None:
    # One round has each optimizer once: ZeroRedundancyOptimizer steps another within its own step.
    if not _seen or id(optimizer) in _seen:
        _seen.clear()
        rounds.mark(time.monotonic_ns())
    _seen.add(id(optimizer))
