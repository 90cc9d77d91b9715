"""Where one piece of one tensor lives."""

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
    """Shape of the whole tensor."""
    local_shape: tuple[int, ...]
    """Shape of this part; a zero where the rank holds nothing."""
    offset: tuple[int, ...]
    """Index in the whole tensor at which this part begins, one number a dim."""
    placements: tuple[str, ...]
    """Placement on each mesh axis, such as ``Shard(0)`` or ``Replicate()``; empty for a plain tensor."""
    dtype: str
    """Such as ``float32``."""
    device: str
    """Such as ``cpu`` or ``cuda:0``."""
    bytes: int
    """Size of this part, padding included."""
    padding: int = 0
    """How many of these bytes are padding, which makes the parts of all ranks equal in size."""
    axes: tuple[str, ...] = ()
    """Names of the mesh axes, one a placement."""
    mesh_shape: tuple[int, ...] = ()
    """Number of ranks along each axis."""
    coordinates: tuple[int, ...] = ()
    """Where the rank is on each axis."""
    gathered: bool = False
    """Whether the tensor is sharded at rest and whole just now."""

    @property
    def fraction(self) -> float:
        """How much of the tensor's elements this rank holds, from 0 to 1; an empty tensor counts as held."""
        whole = part = 1
        for total, local in zip(self.global_shape, self.local_shape, strict=True):
            whole, part = whole * total, part * local
        return part / whole if whole else 1.0
