"""Ranks arranged along named axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["MeshInfo", "MeshSlice", "read_mesh"]


@dataclass(frozen=True, slots=True)
class MeshSlice:
    """A mesh is drawn as slices of two axes at most: the last two, for each place on the others."""

    place: str
    """Where it is on the other axes, such as ``pp 0``; empty when there are none."""
    rows: tuple[tuple[int, ...], ...]
    """The ranks: the last axis but one from top to bottom, the last from left to right."""


@dataclass(frozen=True, slots=True)
class MeshInfo:
    """A mesh that ranks have made."""

    name: str
    """The variable that holds it."""
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    """Size of each axis."""
    ranks: tuple[int, ...]
    """Global ranks, the last axis varying fastest."""

    def __str__(self) -> str:
        name = "mesh" if self.name == "mesh" else f"mesh {self.name}"
        return f"{name}: {' × '.join(f'{axis} {n}' for axis, n in zip(self.axes, self.shape, strict=True))}"

    def slices(self) -> list[MeshSlice]:
        """All of it, in order."""
        *outer, rows, columns = (1,) * (2 - len(self.shape)) + self.shape
        size = rows * columns
        found = []
        for number, begin in enumerate(range(0, len(self.ranks), size)):
            part = self.ranks[begin : begin + size]
            lines = tuple(part[row * columns : (row + 1) * columns] for row in range(rows))
            found.append(MeshSlice(self._place(number, outer), lines))
        return found

    def _place(self, number: int, outer: Sequence[int]) -> str:
        places = []
        for axis, size in reversed(list(zip(self.axes, outer, strict=False))):
            number, at = divmod(number, size)
            places.append(f"{axis} {at}")
        return ", ".join(reversed(places))


def read_mesh(fields: Mapping[str, Any]) -> MeshInfo:
    """From what JSON makes of it, which has no tuples."""
    return MeshInfo(fields["name"], tuple(fields["axes"]), tuple(fields["shape"]), tuple(fields["ranks"]))
