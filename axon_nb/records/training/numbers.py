"""What `config watch_numbers` sees of training steps: digests of parameters and gradients, and numbers not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LAST = -1
"""In place of a step's number: the parameters at the end of the cell."""


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The first number on a rank that is not finite."""

    optimizer: int
    step: int
    """As in `StepNumbers`."""
    stage: str
    """Where it arose: in the ``weight`` before the step, the ``input`` of the model, the ``forward``, the ``loss``, the
    ``backward``, or a ``gradient`` after all of that, such as one that came from another rank."""
    name: str
    """Path of the module, or of the parameter in the stages ``weight`` and ``gradient``; may be empty."""
    module: str = ""
    """Class of the module; may be empty."""
    operation: str = ""
    """The function that computed it; empty if unknown."""
    where: str = ""
    """The line of the cell, such as ``line 7``: of the operation if that is known, else of the step."""
    order: int = 0
    """Within a stage, how much was computed before: a number that is not finite spreads to other ranks."""


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The digests of one optimizer step on a rank, taken before the optimizer uses the gradients."""

    optimizer: int
    """Its number in the cell, in the order of first steps."""
    step: int
    """Its steps in the cell before this one; `LAST`: the end of the cell."""
    where: str
    """The line of the cell that makes the step, such as ``line 7``."""
    before: str
    """The same of the step before; empty: there is none in this cell."""
    names: Sequence[str]
    """The parameters that have replicas."""
    sets: Sequence[tuple[Sequence[int], Sequence[int]]]
    """Ranks that hold the same, and the parameters that they share, by their index in `names`."""
    weights: Sequence[int]
    """A checksum of each parameter."""
    gradients: Sequence[int]
    """A checksum of each gradient, or 0 if there is none to compare; empty at the end of a cell."""
