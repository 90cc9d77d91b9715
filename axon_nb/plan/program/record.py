"""What one rank's run of a program leaves: operations, calls and waits in the host's order, and its peak of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["MAIN_STREAM", "Call", "Event", "Place", "RankRecord"]

MAIN_STREAM = 0
Event = tuple[str, int, float, int]
"""What the host did: ``op`` (stream, seconds, place), ``call`` (stream, -, index of the call), ``wait`` (stream, -,
index of the call), ``record`` (stream, -, event), ``wait_event`` (stream, -, event), ``sync`` (the host waits), or
``step`` (an optimizer, by the order of their first steps)."""


class Place(NamedTuple):
    """Where and when an operation runs."""

    file: str
    """Of the user's code; empty: none is on the stack."""
    line: int
    phase: str
    """``forward``, ``backward`` or ``optimizer``."""


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
