"""Placement of one shard of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Shard"]


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that one rank holds."""

    name: str
    """Name of the tensor, such as ``layers.0.weight``."""
    role: str
    """``parameter``, ``gradient``, ``optimizer``, ``buffer`` or ``tensor``."""
    rank: int
    """Rank in the default group."""
    global_shape: tuple[int, ...]
    """Shape of the full tensor."""
    local_shape: tuple[int, ...]
    """Shape of this part; contains a zero if the rank holds nothing."""
    offset: tuple[int, ...]
    """Index in the full tensor at which this part begins, one number per dimension."""
    placements: tuple[str, ...]
    """Placement on each mesh axis, such as ``Shard(0)`` or ``Replicate()``; empty for a plain tensor."""
    dtype: str
    """Such as ``float32``."""
    device: str
    """Such as ``cpu`` or ``cuda:0``."""
    bytes: int
    """Size of this part, padding included."""
    padding: int = 0
    """How many of these bytes are padding, added to make all parts equal in size."""
    axes: tuple[str, ...] = ()
    """Names of the mesh axes, one per placement."""
    mesh_shape: tuple[int, ...] = ()
    """Number of ranks along each axis."""
    coordinates: tuple[int, ...] = ()
    """The rank's coordinate on each axis."""
    gathered: bool = False
    """Whether the tensor is normally sharded but currently unsharded."""

    @property
    def fraction(self) -> float:
        """Fraction of the tensor's elements on this rank, 0 to 1; 1 for an empty tensor."""
        whole = part = 1
        for total, local in zip(self.global_shape, self.local_shape, strict=True):
            whole, part = whole * total, part * local
        return part / whole if whole else 1.0
