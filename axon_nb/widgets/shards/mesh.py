"""The ranks that hold tensors, in the order of the mesh over which most of them are spread."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from axon_nb.records.placement import Shard

_MAX_COLUMNS = 32
"""Of a grid without axes."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks row by row; the last axis goes from left to right."""

    title: str
    """Text such as ``mesh: dp 2 × tp 4``, or ``ranks`` if no mesh has all of them."""
    columns: int
    ranks: tuple[int, ...]
    places: tuple[str, ...]
    """Coordinates of each, such as ``dp 0, tp 3``; empty without a mesh."""


def find_mesh(shards: Sequence[Shard]) -> Mesh:
    """Return the mesh with most axes that places every rank; if there is none, the ranks in order."""
    ranks = sorted({shard.rank for shard in shards})
    known: dict[tuple[tuple[str, ...], tuple[int, ...]], dict[int, tuple[int, ...]]] = {}
    uses: Counter[tuple[tuple[str, ...], tuple[int, ...]]] = Counter()
    for shard in shards:
        if shard.axes and math.prod(shard.mesh_shape) == len(ranks):
            key = (shard.axes, shard.mesh_shape)
            known.setdefault(key, {})[shard.rank] = shard.coordinates
            uses[key] += 1
    whole = [key for key, places in known.items() if len(set(places.values())) == len(places) == len(ranks)]
    if not whole:
        columns = len(ranks) if len(ranks) <= _MAX_COLUMNS // 2 else min(_MAX_COLUMNS, math.isqrt(len(ranks) - 1) + 1)
        return Mesh("ranks", max(1, columns), tuple(ranks), ("",) * len(ranks))
    axes, shape = best = max(whole, key=lambda key: (len(key[0]), uses[key]))
    places = known[best]
    ordered = sorted(ranks, key=places.__getitem__)
    names = [", ".join(f"{axis} {at}" for axis, at in zip(axes, places[rank], strict=True)) for rank in ordered]
    columns = shape[-1] if len(shape) > 1 else min(shape[0], _MAX_COLUMNS)
    return Mesh(f"mesh: {_sizes(axes, shape)}", columns, tuple(ordered), tuple(names))


def _sizes(axes: Sequence[str], shape: Sequence[int]) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in zip(axes, shape, strict=True))
