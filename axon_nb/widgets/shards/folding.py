"""Tensors of repeated blocks as one row: `blocks.0-31.norm.weight` stands for 32 that differ only by a number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from axon_nb.records.ranks import format_ranks
from axon_nb.widgets.shards.tensors import PlacedTensor

_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])|(?<=[A-Za-z])\d+(?=\.|$)")
"""A number that is a part of a name, or ends one: `blocks.12.up`, `block12.up`."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Tensors that differ by one number in their names only."""

    name: str
    """With the numbers of all, such as ``blocks.0-16,18-31.norm.weight``."""
    tensors: tuple[PlacedTensor, ...]

    @property
    def first(self) -> PlacedTensor:
        """One of them, which shows what all are like."""
        return self.tensors[0]


def fold(tensors: Iterable[PlacedTensor]) -> list[Alike]:
    """Return the tensors in order, with those that are alike together, where the first of them is.

    They are alike if their shapes, placements and parts are equal, and their names but for the first number.
    """
    groups: dict[object, list[PlacedTensor]] = {}
    for tensor in tensors:
        pattern = _NUMBER.sub("{}", tensor.name, count=1)
        key = (pattern, tensor.role, tensor.shape, tensor.dtype, tensor.placements, tensor.axes, tensor.parts)
        groups.setdefault((*key, tensor.gathered), []).append(tensor)
    return [Alike(_name(group), tuple(group)) for group in groups.values()]


def _name(group: Sequence[PlacedTensor]) -> str:
    name = group[0].name
    match = _NUMBER.search(name)
    if len(group) == 1 or match is None:
        return name
    numbers = sorted(int(number[0]) for tensor in group if (number := _NUMBER.search(tensor.name)))
    return f"{name[: match.start()]}{format_ranks(numbers)}{name[match.end() :]}"
