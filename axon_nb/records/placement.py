"""Where data is: device meshes (ranks along named axes), and the placement of one shard of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MeshSlice:
    """A 2-D slice of a mesh for drawing: its last two axes at fixed coordinates on the others."""

    place: str
    """Coordinates on the other axes, such as ``pp 0``; empty if there are none."""
    rows: tuple[tuple[int, ...], ...]
    """Ranks: the second-to-last axis from top to bottom, the last from left to right."""


@dataclass(frozen=True, slots=True)
class MeshInfo:
    """A device mesh created on the ranks."""

    name: str
    """The variable that holds it."""
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    """Size of each axis."""
    ranks: tuple[int, ...]
    """Global ranks; the last axis varies fastest."""

    def __str__(self) -> str:
        name = "mesh" if self.name == "mesh" else f"mesh {self.name}"
        return f"{name}: {' × '.join(f'{axis} {n}' for axis, n in zip(self.axes, self.shape, strict=True))}"

    def slices(self) -> list[MeshSlice]:
        """Split the mesh into 2-D slices, in order."""
        *outer, rows, columns = (1,) * (2 - len(self.shape)) + self.shape
        size = rows * columns
        slices = []
        for number, begin in enumerate(range(0, len(self.ranks), size)):
            part = self.ranks[begin : begin + size]
            lines = tuple(part[row * columns : (row + 1) * columns] for row in range(rows))
            slices.append(MeshSlice(self._place(number, outer), lines))
        return slices

    def _place(self, number: int, outer: Sequence[int]) -> str:
        places = []
        for axis, size in reversed(list(zip(self.axes, outer, strict=False))):
            number, at = divmod(number, size)
            places.append(f"{axis} {at}")
        return ", ".join(reversed(places))


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
