"""What a panel shows of a question about memory: what was asked, how far its answer is, and the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from axon_nb.records.memory_setup import MemorySetup

__all__ = ["MemoryEstimate", "WhatIfState"]


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Predicted memory of ranks, in bytes."""

    setup: MemorySetup
    method: str
    """How it was found, such as ``simulated`` or ``model states only``."""
    worst: int
    """The rank with the highest peak."""
    persistent: Mapping[int, Mapping[str, int]]
    """By rank: after a step of the optimizer, gradients still there, by role."""
    peak: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """By rank: at the highest moment of a step, by role; empty where only model states are known."""
    when: str = ""
    """The phase and the module of the worst rank's peak."""
    host: int = 0
    """What the worst rank keeps in the host's memory."""
    notes: tuple[str, ...] = ()
    """What the numbers rest on."""

    @property
    def is_whole(self) -> bool:
        """Whether activations and buffers are in it."""
        return bool(self.peak)


@dataclass(frozen=True, slots=True)
class WhatIfState:
    """One moment of a question."""

    as_is: MemorySetup | None = None
    """How the model is trained now; None: not known yet."""
    is_trained_so: bool = False
    """Whether that is known; False: it is a proposal."""
    setup: MemorySetup | None = None
    """What was asked last."""
    estimate: MemoryEstimate | None = None
    """The answer to it, as far as there is one."""
    reference: MemoryEstimate | None = None
    """The answer for `as_is`, to compare with."""
    doing: str = ""
    """What is done now, such as ``simulating: a step of rank 0``; empty: nothing."""
    share: float | None = None
    """How much of that is done, 0 to 1."""
    error: str = ""
    """A sentence: why there is no answer."""
    notes: tuple[str, ...] = ()
    """What is not known of the model."""
