"""What one rank's run of a program leaves, and which ranks do the same work: one run stands for all of them.

A record has operations, calls and waits in the host's order, and the rank's peak of memory. The groups that rank 0 uses
divide the world into axes, as a mesh does. Along each axis the first three ranks and the last one run; where they
differ, ranks between them run, too, as in a search by thirds. Then one rank runs per combination.
"""

from __future__ import annotations

import itertools
import linecache
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    from axon_nb.plan.footprint.fake_world import Change

MAIN_STREAM = 0
_MAX_CODE = 60
Event = tuple[str, int, float, int]
"""What the host did: ``op`` (stream, seconds, place), ``call`` (stream, -, index of the call), ``wait`` (stream, -,
index of the call), ``record`` (stream, -, event), ``wait_event`` (stream, -, event), ``sync`` (the host waits), or
``step`` (an optimizer, by the order of their first steps)."""
TensorFact = tuple[tuple[int, ...], str, bool]
"""A tensor's shape, dtype such as ``float32``, and requires_grad."""
Boundary = tuple[TensorFact, ...]
"""The tensors of a microbatch that cross a stage boundary."""


class Place(NamedTuple):
    """Where and when an operation runs."""

    file: str
    """Of the user's code; empty: none is on the stack."""
    line: int
    phase: str
    """``forward``, ``backward`` or ``optimizer``."""

    @property
    def text(self) -> str:
        """The place with its code, such as ``train.py:12 (backward) loss.backward()``."""
        phase = "" if self.phase == "forward" else f" ({self.phase})"
        if not self.file:
            return f"outside the program{phase}"
        code = linecache.getline(self.file, self.line).strip()
        code = code if len(code) <= _MAX_CODE else f"{code[:_MAX_CODE]}…"
        name = "cell" if "ipykernel_" in self.file else Path(self.file).name
        return f"{name}:{self.line}{phase} {code}".rstrip()


class Call(Struct, frozen=True):
    """One collective or message."""

    name: str
    """One of `links.OPERATIONS`, or ``recv``."""
    group: int
    """Index into `RankRecord.groups`."""
    bytes: int
    """Of the whole tensor."""
    place: int
    """Index into `RankRecord.places`."""
    peer: int = -1
    """The other rank of a message, in the world."""


class PipelineStep(NamedTuple):
    """What the ranks of one of our pipelines tell each other before a step."""

    is_changed: bool
    """Whether a rank makes its stages again."""
    boundaries: tuple[Boundary, ...] | None
    """The model's inputs, and what each stage returns; None: unknown."""


class Peak(NamedTuple):
    """The highest moment of memory."""

    bytes: int
    place: int
    """Where it was reached."""
    by_place: Mapping[int, int]
    """Bytes that were held, by where they were allocated."""
    over: int | None
    """Where memory first exceeded the limit; None: it did not."""

    @classmethod
    def of(cls, changes: Sequence[Change], made_at: Mapping[int, int], limit: float | None) -> Peak:
        """Find the highest moment.

        Args:
            changes: Of storages, in order.
            made_at: Place by storage.
            limit: Bytes of memory; None: unlimited.
        """
        total = peak = at = 0
        over = None
        for number, change in enumerate(changes):
            total += change.size
            if total > peak:
                peak, at = total, number
            if over is None and limit is not None and total > limit:
                over = made_at.get(change.block, 0)
        held: Counter[int] = Counter()
        for change in changes[: at + 1]:
            held[change.block] += change.size
        by_place: Counter[int] = Counter()
        for block, size in held.items():
            if size:
                by_place[made_at.get(block, 0)] += size
        return cls(peak, made_at.get(changes[at].block, 0) if changes else 0, dict(by_place), over)


class RankRecord(Struct, frozen=True):
    """One rank's run."""

    rank: int
    places: tuple[Place, ...]
    events: tuple[Event, ...]
    calls: tuple[Call, ...]
    groups: tuple[tuple[int, ...], ...]
    """Ranks of each group, in the order of first use."""
    flops: float
    peak: Peak
    num_steps: int
    """Steps of the first optimizer."""
    signature: int
    """Equal for ranks that do the same work; comparable between forks of one process."""
    dtypes: tuple[str, ...] = ()
    """Of matrix products: names as in `Rates.products`."""
    pipeline_steps: tuple[PipelineStep, ...] = ()
    """Of our pipelines; other ranks need those of rank 0."""


Run = Callable[[Sequence[int]], Mapping[int, RankRecord]]
"""Runs ranks that have not run yet, and returns their records."""


class Lane(Struct, frozen=True):
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
    """Group ranks by what they did, in the order of their first ranks."""
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
