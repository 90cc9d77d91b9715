"""Which ways there are to lay a number of GPUs out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Mesh", "meshes"]

_TIMES = (1, 2, 4, 8)
"""Microbatches of a pipeline, as multiples of its ranks."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks along three axes."""

    dp: int
    tp: int
    pp: int
    num_microbatches: tuple[int, ...] = (1,)
    """Numbers of them to be tried."""
    reason: str = ""
    """Why the batch cannot be dealt out so; empty: it can."""

    @property
    def axes(self) -> dict[str, int]:
        """Size by axis, the last one varying fastest."""
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}


def meshes(num_gpus: int, batch: int, *, max_tp: int) -> Iterator[Mesh]:
    """All meshes of so many ranks.

    Args:
        num_gpus: Ranks.
        batch: Samples of a step, over all ranks.
        max_tp: Ranks along ``tp`` at most.
    """
    for tp in _divisors(num_gpus, max_tp):
        for pp in _divisors(num_gpus // tp, num_gpus // tp):
            yield _mesh(num_gpus // tp // pp, tp, pp, batch)


def _mesh(dp: int, tp: int, pp: int, batch: int) -> Mesh:
    own, rest = divmod(batch, dp)
    if rest:
        return Mesh(dp, tp, pp, reason=f"batch={batch} is no multiple of dp={dp}")
    if pp == 1:
        return Mesh(dp, tp, pp)
    counts = tuple(times * pp for times in _TIMES if own % (times * pp) == 0)
    if not counts:
        samples = f"{own} sample{'s' if own > 1 else ''}"
        return Mesh(dp, tp, pp, reason=f"a rank's batch of {samples} makes no multiple of pp={pp} microbatches")
    return Mesh(dp, tp, pp, counts)


def _divisors(number: int, largest: int) -> list[int]:
    return [n for n in range(1, min(number, largest) + 1) if number % n == 0]
