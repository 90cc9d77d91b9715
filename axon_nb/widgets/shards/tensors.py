"""Tensors merged from their parts on all ranks: one record per tensor, ready to be drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from axon_nb.records.placement import Shard
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import format_bytes

Kind = Literal["sharded", "replicated", "partial", "own"]
_DIM_NAMES = {1: {0: "elements"}, 2: {0: "rows", 1: "columns"}}
"""Names of the dims of vectors and matrices, by the number of dims."""


@dataclass(frozen=True, slots=True)
class Part:
    """One region of a tensor, and the ranks that hold it."""

    ranks: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    bytes: int
    """On each of these ranks, padding included."""
    padding: int
    device: str

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements."""
        return 0 in self.shape


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor and where its parts are."""

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[str, ...]
    axes: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    gathered: bool
    parts: tuple[Part, ...]
    """In the order of their lowest ranks."""

    @property
    def kind(self) -> Kind:
        """Summary of the placements; ``own``: each rank has an independent tensor of that name."""
        if not self.placements:
            return "own"
        if any(placement.startswith("Partial") for placement in self.placements):
            return "partial"
        return "sharded" if any(placement.startswith("Shard") for placement in self.placements) else "replicated"

    @property
    def bytes(self) -> int:
        """Bytes on all ranks together."""
        return sum(part.bytes * len(part.ranks) for part in self.parts)

    @property
    def padding(self) -> int:
        """Bytes of padding on all ranks together."""
        return sum(part.padding * len(part.ranks) for part in self.parts)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have the tensor, including those with an empty part."""
        return tuple(sorted(rank for part in self.parts for rank in part.ranks))


def merge_shards(shards: Iterable[Shard]) -> list[PlacedTensor]:
    """Return the tensors in the order of the lowest rank; those that only other ranks have come last."""
    groups: dict[tuple[str, str, tuple[int, ...], str], list[Shard]] = {}
    for shard in sorted(shards, key=lambda shard: shard.rank):
        groups.setdefault((shard.role, shard.name, shard.global_shape, shard.dtype), []).append(shard)
    return [_merge(group) for group in groups.values()]


def _merge(shards: Sequence[Shard]) -> PlacedTensor:
    first = shards[0]
    regions: dict[tuple[object, ...], list[Shard]] = {}
    for shard in shards:
        key = (shard.offset, shard.local_shape, shard.bytes, shard.device)
        regions.setdefault(key, []).append(shard)
    parts = tuple(
        Part(tuple(s.rank for s in same), same[0].offset, same[0].local_shape, same[0].bytes, same[0].padding, device)
        for (_, _, _, device), same in ((key, same) for key, same in regions.items())
        if isinstance(device, str)
    )
    return PlacedTensor(
        first.name, first.role, first.global_shape, first.dtype, first.placements, first.axes, first.mesh_shape,
        first.gathered, parts,
    )  # fmt: skip


def bytes_by_rank(tensors: Iterable[PlacedTensor]) -> dict[int, int]:
    """Return the bytes that each rank holds of all tensors."""
    total: dict[int, int] = {}
    for tensor in tensors:
        for part in tensor.parts:
            for rank in part.ranks:
                total[rank] = total.get(rank, 0) + part.bytes
    return dict(sorted(total.items()))


def ranks_by_bytes(bytes_by_rank: Mapping[int, int]) -> list[tuple[int, list[int]]]:
    """Return the ranks that hold the same number of bytes, for each of these numbers."""
    groups: dict[int, list[int]] = {}
    for rank, size in bytes_by_rank.items():
        groups.setdefault(size, []).append(rank)
    return list(groups.items())


def describe_placement(tensor: PlacedTensor) -> str:
    """Describe where a tensor's parts are, such as ``rows over dp (4)`` or ``copies over dp (2)``."""
    ranks = name_ranks(tensor.ranks)
    if tensor.kind == "own":
        return f"{ranks}: each its own" if len(tensor.ranks) > 1 else f"{ranks} alone"
    parts = []
    for placement, axis, count in zip(tensor.placements, tensor.axes, tensor.mesh_shape, strict=True):
        over = f"{axis} ({count})"
        if placement.startswith("Shard"):
            dim = int(placement[6:-1])
            parts.append(f"{_DIM_NAMES.get(len(tensor.shape), {}).get(dim, f'dim {dim}')} over {over}")
        elif placement.startswith("Partial"):
            parts.append(f"partial sums over {over}" if "sum" in placement else f"{placement} over {over}")
        elif count > 1:
            parts.append(f"copies over {over}")
    text = ", ".join(parts) or ranks
    if tensor.gathered:
        text += "; gathered for now, sharded at rest"
    if tensor.padding:
        text += f"; {format_bytes(tensor.padding)} of padding"
    return text
