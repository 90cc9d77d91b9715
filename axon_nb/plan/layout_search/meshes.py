"""The meshes that a number of ranks allows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

_AXES = ("pp", "dp", "ep", "cp", "tp")
_MICROBATCHES_PER_RANK = (1, 2, 4, 8)
"""Numbers of microbatches to try, as multiples of the pipeline's ranks."""


def mesh_axes(sizes: Any) -> dict[str, int]:
    """Return the size of each axis, without ``ep`` and ``cp`` where they have one rank; the last varies fastest.

    Args:
        sizes: An object with a size for each axis.
    """
    held = {axis: getattr(sizes, axis) for axis in _AXES}
    return {axis: size for axis, size in held.items() if size > 1 or axis not in ("ep", "cp")}


class AxisLimits(Struct, frozen=True):
    """Sizes of axes to try."""

    max_tp: int
    """Largest number of ranks along ``tp``."""
    ep: tuple[int, ...] = (1,)
    cp: tuple[int, ...] = (1,)

    @property
    def shared(self) -> tuple[str, ...]:
        """Which of ``ep`` and ``cp`` are tried."""
        return tuple(axis for axis, sizes in (("ep", self.ep), ("cp", self.cp)) if len(sizes) > 1)


class CandidateMesh(Struct, frozen=True):
    """Ranks along each axis."""

    dp: int
    tp: int
    pp: int
    num_microbatches: tuple[int, ...] = (1,)
    """Numbers of microbatches to try."""
    reason: str = ""
    """Why the batch cannot be split in this way; empty: it can be."""
    ep: int = 1
    cp: int = 1

    @property
    def axes(self) -> dict[str, int]:
        """Size by axis; the last one varies fastest."""
        return mesh_axes(self)


def candidate_meshes(num_gpus: int, batch: int, limits: AxisLimits) -> Iterator[CandidateMesh]:
    """Yield all meshes of a number of GPUs.

    Args:
        num_gpus: Ranks.
        batch: Samples per step over all ranks.
        limits: Sizes to try.
    """
    for tp in divisors(num_gpus, limits.max_tp):
        for cp, ep in itertools.product(limits.cp, limits.ep):
            rest, left_over = divmod(num_gpus, tp * cp * ep)
            for pp in [] if left_over else divisors(rest, rest):
                yield _checked(CandidateMesh(rest // pp, tp, pp, ep=ep, cp=cp), batch)


def _checked(mesh: CandidateMesh, batch: int) -> CandidateMesh:
    dp, ep, pp = mesh.dp, mesh.ep, mesh.pp
    own, rest = divmod(batch, dp * ep)
    if rest:
        by = f"dp={dp}" if ep == 1 else f"dp={dp} x ep={ep}"
        return replace(mesh, reason=f"global_batch={batch} is not divisible by {by}")
    if pp == 1:
        return mesh
    counts = tuple(times * pp for times in _MICROBATCHES_PER_RANK if own % (times * pp) == 0)
    if not counts:
        samples = f"{own} sample{'s' if own > 1 else ''}"
        return replace(
            mesh, reason=f"a rank's batch of {samples} cannot be split into a multiple of pp={pp} microbatches"
        )
    return replace(mesh, num_microbatches=counts)


def divisors(number: int, largest: int) -> list[int]:
    """Return the divisors of a number that are at most `largest`."""
    return [n for n in range(1, min(number, largest) + 1) if number % n == 0]
