"""Digests of tensors: what `%%distributed --compare` and `config watch_numbers` compare; and numbers not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct, field

_MARGIN = 8.0
"""How often the measured noise is allowed: it is one sample of a random error."""
_ROUNDING = 16 * 2.0**-23
"""Relative error that sums in another order may have in float32, beyond one rounding of the result."""
Vector = Sequence[float]
Bounds = tuple[tuple[int, int], ...]
"""Start and end of a part in each dimension of the whole tensor."""
LAST = -1
"""In place of a step's number: the parameters at the end of the cell."""


class Digest(Struct, frozen=True):
    """A tensor, in constant memory; projections are linear, so those of a sum are the sum of those of its parts."""

    norm: float
    peak: float
    """Largest absolute value."""
    is_finite: bool
    projections: tuple[float, ...]
    """Products with fixed vectors of random signs: the mean of their squares estimates the square of the norm."""


class Place(Struct, frozen=True):
    """A rank's part of the global batch, and its index among the ranks with the same part."""

    start: int = 0
    length: int = 1
    total: int = 1
    index: int = 0
    count: int = 1


class Observation(Struct, frozen=True):
    """One tensor as a rank computed it."""

    kind: str
    """``start`` (a parameter before the cell), ``input``, ``output``, ``mask``, ``grad_output``, ``grad_input``,
    ``gradient`` (of a parameter, at the optimizer's step) or ``weight`` (after it)."""
    name: str
    """Path of the module or parameter in the model."""
    index: int
    """Which of several inputs or outputs."""
    call: int
    """Which call of the module, or which step."""
    shape: tuple[int, ...]
    digest: Digest
    bounds: Bounds | None = None
    """This rank's part, if the tensor itself says so; None: it follows from the shapes."""
    epsilon: float = 0.0
    """Relative spacing of its numbers; 0 for integers."""


class Entry(Struct, frozen=True):
    """One tensor on all ranks that computed it, beside the same parts of the reference's."""

    kind: str
    name: str
    index: int
    call: int
    module: str
    """Class of the module."""
    epsilon: float
    """Relative spacing of its numbers."""
    ranks: dict[int, Digest]
    parts: dict[int, Bounds]
    reference: dict[int, Digest]
    noise: dict[int, float]
    """By how much the reference's part changed when weights and inputs changed by one unit in the last place; a weight
    after the step, when its gradient changed by as much as is allowed."""
    candidates: dict[str, dict[int, Digest]] = field(default_factory=dict)
    """What the part would be with a known mistake, or what would be added to it, by cause."""


class Comparison(Struct, frozen=True):
    """All that was compared, in the order in which the reference computed it."""

    entries: list[Entry]
    places: dict[int, Place]
    batch: tuple[str, ...]
    """The variables that were joined to the global batch."""
    unmatched: tuple[str, ...]
    """Modules that ranks and reference computed in shapes that do not fit each other."""
    random: str = ""
    """The first module that draws random numbers other than dropout's; empty: none does."""
    problem: str = ""
    """Why nothing was compared; empty: it was."""
    is_same_part: bool = False
    """Whether the model gets the same on all ranks, and something else on one."""
    undropped: tuple[str, tuple[int, ...]] = ("", ())
    """A dropout layer in training mode on some ranks only, and the others; empty: there is none."""
    settings: str = ""
    """How optimizers differ between ranks, such as ``lr is 0.1 on rank 0, 0.2 on rank 1``; empty: they do not."""


def allowed_error(entry: Entry, rank: int) -> float:
    """Return by how much a rank's tensor may be off the reference's, in the unit of its norm."""
    norm, noise = entry.reference[rank].norm, entry.noise.get(rank, 0.0)
    if entry.kind == "start":  # nothing was computed yet: replicas are equal
        return _ROUNDING * norm
    margin = 1.0 if entry.kind == "weight" else _MARGIN
    return margin * noise + (entry.epsilon + _ROUNDING) * norm


def distance(one: Vector, other: Vector) -> float:
    """Estimate the norm of the difference of two tensors."""
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / len(one))


def combined(vectors: Iterable[Vector]) -> list[float]:
    """Return the projections of the sum of tensors."""
    return [sum(values) for values in zip(*vectors, strict=True)]


def ratio_of(one: Vector, reference: Vector) -> float:
    """Return the factor between two tensors, by least squares; 0 if the reference is 0."""
    square = sum(value * value for value in reference)
    return sum(a * b for a, b in zip(one, reference, strict=True)) / square if square else 0.0


def norm_of(digests: Iterable[Digest]) -> float:
    """Return the norm of tensors together."""
    return math.sqrt(sum(digest.norm**2 for digest in digests))


class Origin(Struct, frozen=True):
    """Where the first number on a rank that is not finite arose."""

    stage: str
    """In the ``weight`` before the step, the ``input`` of the model, the ``forward``, the ``loss``, the ``backward``,
    or a ``gradient`` after all that, such as one that came from another rank."""
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


class NonFinite(Origin, frozen=True, kw_only=True):
    """The first number on a rank that is not finite."""

    optimizer: int
    step: int
    """As in `StepNumbers`."""


class StepNumbers(Struct, frozen=True):
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
