"""The parts of tensors, put together again: one record a tensor, ready to be drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from axon_nb.records.placement import Shard
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import format_bytes

__all__ = ["Kind", "Part", "PlacedTensor", "bytes_by_rank", "in_words", "put_together"]

Kind = Literal["sharded", "replicated", "partial", "own"]
_DIM_NAMES = {1: {0: "elements"}, 2: {0: "rows", 1: "columns"}}
"""What the dims of vectors and matrices are called, by the number of dims."""


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
        """Whether it has no element."""
        return 0 in self.shape


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor, and where its parts are."""

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
        """What the placements come to; ``own``: each rank's, of which nothing is known to the others."""
        if not self.placements:
            return "own"
        if any(placement.startswith("Partial") for placement in self.placements):
            return "partial"
        return "sharded" if any(placement.startswith("Shard") for placement in self.placements) else "replicated"

    @property
    def bytes(self) -> int:
        """On all ranks together."""
        return sum(part.bytes * len(part.ranks) for part in self.parts)

    @property
    def padding(self) -> int:
        """Bytes of padding on all ranks together."""
        return sum(part.padding * len(part.ranks) for part in self.parts)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that have it, also those that hold an empty part."""
        return tuple(sorted(rank for part in self.parts for rank in part.ranks))


def put_together(shards: Iterable[Shard]) -> list[PlacedTensor]:
    """Tensors in the order in which the lowest rank names them; what other ranks have besides comes after."""
    groups: dict[tuple[str, str, tuple[int, ...], str], list[Shard]] = {}
    for shard in sorted(shards, key=lambda shard: shard.rank):
        groups.setdefault((shard.role, shard.name, shard.global_shape, shard.dtype), []).append(shard)
    return [_tensor(found) for found in groups.values()]


def _tensor(shards: Sequence[Shard]) -> PlacedTensor:
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
    """Bytes that each rank holds of all of them."""
    total: dict[int, int] = {}
    for tensor in tensors:
        for part in tensor.parts:
            for rank in part.ranks:
                total[rank] = total.get(rank, 0) + part.bytes
    return dict(sorted(total.items()))


def in_words(tensor: PlacedTensor) -> str:
    """How a tensor lies, such as ``rows over dp (4)``, ``a copy on each rank``."""
    ranks = name_ranks(tensor.ranks)
    if tensor.kind == "own":
        return f"{ranks}: each its own" if len(tensor.ranks) > 1 else f"{ranks} alone"
    pieces = []
    for placement, axis, count in zip(tensor.placements, tensor.axes, tensor.mesh_shape, strict=True):
        over = f"{axis} ({count})"
        if placement.startswith("Shard"):
            dim = int(placement[6:-1])
            pieces.append(f"{_DIM_NAMES.get(len(tensor.shape), {}).get(dim, f'dim {dim}')} over {over}")
        elif placement.startswith("Partial"):
            pieces.append(f"summands over {over}" if "sum" in placement else f"{placement} over {over}")
        elif count > 1:
            pieces.append(f"copies over {over}")
    text = ", ".join(pieces) or ranks
    if tensor.gathered:
        text += "; whole for now, sharded at rest"
    if tensor.padding:
        text += f"; {format_bytes(tensor.padding)} of padding"
    return text
