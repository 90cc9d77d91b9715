"""State of a what-if question about memory: the question, the progress and the prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from axon_nb.records.memory_setup import MemorySetup

__all__ = ["MemoryPrediction", "WhatIfState"]


@dataclass(frozen=True, slots=True)
class MemoryPrediction:
    """Predicted memory of ranks in bytes."""

    setup: MemorySetup
    method: str
    """How it was obtained, such as ``simulated`` or ``model states only``."""
    worst: int
    """Rank with the highest peak."""
    persistent: Mapping[int, Mapping[str, int]]
    """By rank and role: memory after an optimizer step, before gradients are freed."""
    peak: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """By rank and role: memory at the peak of a step; empty if only model states are known."""
    when: str = ""
    """Phase and module of the worst rank's peak."""
    host: int = 0
    """Host memory that the worst rank uses."""
    notes: tuple[str, ...] = ()
    """Assumptions behind the numbers."""

    @property
    def is_whole(self) -> bool:
        """Whether activations and buffers are included."""
        return bool(self.peak)


@dataclass(frozen=True, slots=True)
class WhatIfState:
    """Snapshot of a what-if question."""

    as_is: MemorySetup | None = None
    """The current training setup; None while unknown."""
    is_trained_so: bool = False
    """Whether `as_is` is known to be in use; False if it is only assumed."""
    setup: MemorySetup | None = None
    """The setup of the last question."""
    estimate: MemoryPrediction | None = None
    """The prediction for it, possibly partial."""
    reference: MemoryPrediction | None = None
    """The prediction for `as_is`, for comparison."""
    doing: str = ""
    """Current activity, such as ``simulating: a step of rank 0``; empty when idle."""
    share: float | None = None
    """Fraction of it that is done, 0 to 1."""
    error: str = ""
    """Why there is no prediction, as a sentence."""
    notes: tuple[str, ...] = ()
    """What is unknown about the model."""
