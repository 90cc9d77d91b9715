"""Which ranks do the same work: one run stands for all of them.

The groups that rank 0 uses divide the world into axes, as a mesh does. Along each axis the first three ranks and the
last one run; where they differ, ranks between them run, too, as in a search by thirds. Then one rank runs per
combination.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from axon_nb.plan.program.record import RankRecord

Run = Callable[[Sequence[int]], Mapping[int, RankRecord]]
"""Runs ranks that have not run yet, and returns their records."""


@dataclass(frozen=True)
class Lane:
    """Ranks that do the same work, and the record of one of them."""

    record: RankRecord
    ranks: tuple[int, ...]


def distinct_ranks(size: int, run: Run) -> list[Lane]:
    """Run the ranks that differ.

    Args:
        size: The size of the world.
        run: Runs ranks.
    """
    axes = _axes(run([0])[0].groups, size)
    ends = {stride * place for stride, length in axes for place in (1, 2, length - 1) if place < length}
    run(sorted(ends))
    representatives = [_along(stride, length, run) for stride, length in axes]
    distinct = [sorted(set(places)) for places in representatives]
    offsets = [[stride * place for place in places] for (stride, _), places in zip(axes, distinct, strict=True)]
    records = run([sum(places) for places in itertools.product(*offsets)])
    lanes = {}
    for rank in range(size):
        places = [(rank // stride) % length for stride, length in axes]
        lanes[rank] = records[
            sum(stride * row[place] for (stride, _), row, place in zip(axes, representatives, places, strict=True))
        ]
    return merged(lanes)


def merged(records: Mapping[int, RankRecord]) -> list[Lane]:
    """Group ranks by what they did, in the order of their first ranks.

    Args:
        records: The records by rank.
    """
    members: dict[int, list[int]] = {}
    for rank, record in records.items():
        members.setdefault(record.signature, []).append(rank)
    return [Lane(records[ranks[0]], tuple(ranks)) for ranks in members.values()]


def _axes(groups: Sequence[tuple[int, ...]], size: int) -> list[tuple[int, int]]:
    """Stride and length of the axes whose product is the world, the innermost first."""
    lengths: dict[int, int] = {}
    for group in groups:
        if len(group) > 1 and group[0] == 0:
            stride = group[1]
            if group == tuple(range(0, stride * len(group), stride)):
                lengths[stride] = min(lengths.get(stride, size), len(group))
    axes, stride = [], 1
    while stride < size:
        length = lengths.get(stride, 0)
        if not length or size % (stride * length):
            inner = [other for other in lengths if other > stride and other % stride == 0 and size % other == 0]
            length = min(inner, default=size) // stride
        axes.append((stride, length))
        stride *= length
    return axes or [(1, 1)]


def _along(stride: int, length: int, run: Run) -> list[int]:
    """For each place along an axis, the place that stands for it."""
    representative = list(range(length))
    few = run([stride * place for place in range(min(length, 3))])
    first, second, third = (few[stride * min(place, length - 1)].signature for place in range(3))
    open_ranges = [(int(first != second), length - 1)]  # the first rank often does more: it is one of its kind
    # Where others differ, too, as by parity, equal ends of a range do not say that all in it are equal.
    ahead = int(first != second != third)
    while open_ranges := [(low, high) for low, high in open_ranges if high - low > 1]:
        asked = {place for low, high in open_ranges for place in (low, low + ahead, high)}
        records = run([stride * place for place in sorted(asked)])
        parts: list[tuple[int, int]] = []
        for low, high in open_ranges:
            if len({records[stride * place].signature for place in (low, low + ahead, high)}) == 1:
                representative[low : high + 1] = [representative[low]] * (high + 1 - low)
            else:
                # Three parts: two ranks run at once, so there are fewer rounds than with halves.
                cuts = sorted({low, low + (high - low) // 3, low + 2 * (high - low) // 3, high})
                parts += itertools.pairwise(cuts)
        open_ranges = parts
    return representative
