"""Arithmetic on digests: projections are linear, so sums over ranks and ratios need no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from axon_nb.records.training.comparison import Digest, Entry, allowed_error

_TINY = 1e-30

Vector = Sequence[float]


@dataclass(frozen=True, slots=True)
class Judged:
    """One tensor on one rank: its error, and what is allowed, in the unit of its norm."""

    error: float
    allowed: float
    relative: float
    """The error over the norm of the reference's part."""

    @property
    def is_ok(self) -> bool:
        """Whether the error is allowed."""
        return self.error <= self.allowed


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


class Scales:
    """By rank and call of the model, the factor between its gradients of activations and the reference's."""

    def __init__(self) -> None:
        self.by_call: dict[tuple[int, int], float] = {}

    def of(self, entry: Entry, rank: int) -> float:
        """Return the factor for a tensor of a rank; 1 for what is not the gradient of an activation."""
        return self.by_call.get((rank, entry.call), 1.0) if entry.kind in ("grad_output", "grad_input") else 1.0


def scales_of(entries: Iterable[Entry]) -> Scales:
    """Return the factors of all ranks and calls, such as one for each microbatch.

    A loss that is the mean over a part of the batch has larger gradients than one over all of it; what counts in the
    end are the gradients of parameters. The factor is that of the first gradient that a rank computes in a call.
    """
    scales = Scales()
    for entry in entries:
        if entry.kind in ("grad_output", "grad_input"):
            for rank, digest in entry.ranks.items():
                if (rank, entry.call) not in scales.by_call and entry.reference[rank].norm:
                    scales.by_call[rank, entry.call] = ratio_of(digest.projections, entry.reference[rank].projections)
    return scales


def judge(entry: Entry, scales: Scales) -> dict[int, Judged]:
    """Return by rank how far a tensor is from the reference's."""
    judged = {}
    for rank, digest in entry.ranks.items():
        reference = entry.reference[rank]
        scale = scales.of(entry, rank)
        error = distance(digest.projections, [scale * value for value in reference.projections])
        if digest.is_finite != reference.is_finite:
            error = math.inf
        allowed = abs(scale) * allowed_error(entry, rank)
        norm = abs(scale) * reference.norm
        judged[rank] = Judged(error, allowed + _TINY, error / norm if norm else (math.inf if error else 0.0))
    return judged


def norm_of(digests: Iterable[Digest]) -> float:
    """Return the norm of tensors together."""
    return math.sqrt(sum(digest.norm**2 for digest in digests))
