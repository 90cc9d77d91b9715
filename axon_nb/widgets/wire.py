"""Segments as bytes, kernel to browser: a JSON header and columns. `static/strip/store.js` reads them."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from axon_nb.widgets.history import RankHistory, Segment
from axon_nb.widgets.palette import ACTIVITY_CODES

__all__ = ["Clock", "encode"]


@dataclass(frozen=True, slots=True)
class Clock:
    """What a message says of the whole strip."""

    now: float
    """Seconds since the cell's start."""
    lost: int
    """Samples dropped so far."""
    finished: bool
    """Whether the cell is over."""


def encode(histories: Sequence[RankHistory], clock: Clock, *, starts: Sequence[int]) -> bytes:
    """Pack segments.

    Args:
        histories: One a row of the strip.
        clock: The strip as a whole.
        starts: First segment to send, one number a row; 0 replaces all that the browser holds of that row.

    Returns:
        Header length (uint32) and 4 zero bytes; the header, padded to 8 bytes; then the columns of all segments,
        little-endian: start, end, since (float64, seconds), position, line, low, high (uint32), row, call (uint16),
        activity, mixed (uint8).
    """
    picked = [
        (row, position, segment)
        for row, (history, first) in enumerate(zip(histories, starts, strict=True))
        for position, segment in enumerate(history.segments[first:], start=first)
    ]
    calls = {name: number for number, name in enumerate(dict.fromkeys(segment.call for _, _, segment in picked))}
    header = {
        "count": len(picked),
        "calls": list(calls),
        "generations": [history.generation for history in histories],
        "replaced": [row for row, first in enumerate(starts) if first == 0],
        "coarse": max((history.coarse_before for history in histories), default=0.0),
        "now": clock.now,
        "lost": clock.lost,
        "finished": clock.finished,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<II", len(text), 0) + text + b"".join(_columns(picked, calls))


def _columns(picked: Sequence[tuple[int, int, Segment]], calls: dict[str, int]) -> list[bytes]:
    n = len(picked)
    segments = [segment for _, _, segment in picked]
    return [
        struct.pack(f"<{n}d", *(s.start for s in segments)),
        struct.pack(f"<{n}d", *(s.end for s in segments)),
        struct.pack(f"<{n}d", *(s.since for s in segments)),
        struct.pack(f"<{n}I", *(position for _, position, _ in picked)),
        struct.pack(f"<{n}I", *(s.line for s in segments)),
        struct.pack(f"<{n}I", *(s.low for s in segments)),
        struct.pack(f"<{n}I", *(s.high for s in segments)),
        struct.pack(f"<{n}H", *(row for row, _, _ in picked)),
        struct.pack(f"<{n}H", *(calls[s.call] for s in segments)),
        struct.pack(f"<{n}B", *(ACTIVITY_CODES[s.activity] for s in segments)),
        struct.pack(f"<{n}B", *(s.mixed for s in segments)),
    ]
