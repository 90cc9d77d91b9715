"""What one rank's run of a program leaves: operations, calls and waits in the host's order, and its peak of memory."""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from axon_nb.plan.footprint.storage_log import Change

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


@dataclass(frozen=True, slots=True)
class Call:
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


@dataclass(frozen=True)
class RankRecord:
    """One rank's run."""

    rank: int
    places: tuple[Place, ...]
    events: tuple[Event, ...]
    calls: tuple[Call, ...]
    groups: tuple[tuple[int, ...], ...]
    """Ranks of each group, in the order of first use."""
    flops: float
    peak_bytes: int
    peak_place: int
    """Where the highest moment was reached."""
    by_place: Mapping[int, int]
    """Bytes that were held at the peak, by where they were allocated."""
    over_place: int | None
    """Where memory first exceeded the limit; None: it did not."""
    num_steps: int
    """Steps of the first optimizer."""
    signature: int
    """Equal for ranks that do the same work; comparable between forks of one process."""
    dtypes: tuple[str, ...] = ()
    """Of matrix products: names as in `Rates.products`."""
    pipeline_steps: tuple[PipelineStep, ...] = ()
    """Of our pipelines; other ranks need those of rank 0."""
