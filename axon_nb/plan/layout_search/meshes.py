"""The meshes that a number of GPUs allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_MICROBATCHES_PER_RANK = (1, 2, 4, 8)
"""Numbers of microbatches to try, as multiples of the pipeline's ranks."""


@dataclass(frozen=True, slots=True)
class CandidateMesh:
    """Ranks along three axes."""

    dp: int
    tp: int
    pp: int
    num_microbatches: tuple[int, ...] = (1,)
    """Numbers of microbatches to try."""
    reason: str = ""
    """Why the batch cannot be split in this way; empty: it can be."""

    @property
    def axes(self) -> dict[str, int]:
        """Size by axis; the last one varies fastest."""
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}


def candidate_meshes(num_gpus: int, batch: int, *, max_tp: int) -> Iterator[CandidateMesh]:
    """Yield all meshes of a number of GPUs.

    Args:
        num_gpus: Ranks.
        batch: Samples per step over all ranks.
        max_tp: Largest number of ranks along ``tp``.
    """
    for tp in _divisors(num_gpus, max_tp):
        for pp in _divisors(num_gpus // tp, num_gpus // tp):
            yield _mesh(num_gpus // tp // pp, tp, pp, batch)


def _mesh(dp: int, tp: int, pp: int, batch: int) -> CandidateMesh:
    own, rest = divmod(batch, dp)
    if rest:
        return CandidateMesh(dp, tp, pp, reason=f"global_batch={batch} is not divisible by dp={dp}")
    if pp == 1:
        return CandidateMesh(dp, tp, pp)
    counts = tuple(times * pp for times in _MICROBATCHES_PER_RANK if own % (times * pp) == 0)
    if not counts:
        samples = f"{own} sample{'s' if own > 1 else ''}"
        return CandidateMesh(
            dp, tp, pp, reason=f"a rank's batch of {samples} cannot be split into a multiple of pp={pp} microbatches"
        )
    return CandidateMesh(dp, tp, pp, counts)


def _divisors(number: int, largest: int) -> list[int]:
    return [n for n in range(1, min(number, largest) + 1) if number % n == 0]
