"""What one rank did during a cell: samples merged into segments, bounded however long the cell runs.

Segments as bytes, kernel to browser: a JSON header and columns. `static/strip/store.js` reads them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from axon_nb.records.telemetry import Activity, RankState
from axon_nb.widgets.palette import ACTIVITY_CODES

__all__ = ["SILENCE_S", "TERMINAL", "Clock", "LongestWait", "RankHistory", "Segment", "encode"]

SILENCE_S = 2.0
"""Seconds without a sample after which what the rank does is not known."""

TERMINAL = frozenset({Activity.DONE, Activity.FAILED, Activity.DEAD})
"""Activities that end a rank's part in the cell: they last until the cell is over."""

_IN_CALL = frozenset({Activity.COLLECTIVE, Activity.WAITING})


@dataclass(slots=True)
class Segment:
    """A stretch of one activity; all times in seconds since the cell's start."""

    start: float
    end: float
    """Time of the last sample that belongs to it, or of the change to the next activity."""
    activity: Activity
    call: str
    since: float
    """Start of the call it is in; it may lie before `start`."""
    line: int
    """Line of the cell at the last sample; 0: not known."""
    low: int
    """First line seen; 0: not known."""
    high: int
    """Last line seen; 0: not known."""
    mixed: bool = False
    """Shorter stretches were merged into this one: it shows what took most of the time."""

    def holds(self, state: RankState) -> bool:
        """Whether the sample tells of the same activity: in a call its line counts too."""
        if state.activity is not self.activity or state.call != self.call or self.mixed:
            return False
        return self.activity not in _IN_CALL or (state.line or 0) == self.line

    def extend(self, now: float, since: float, line: int) -> None:
        """Take in one more sample."""
        self.end, self.since, self.line = now, since, line
        if line:
            self.low, self.high = min(self.low or line, line), max(self.high, line)


@dataclass(frozen=True, slots=True)
class LongestWait:
    """The longest a rank was in one communication call."""

    seconds: float
    call: str
    line: int
    """Line of the cell; 0: not known."""


class RankHistory:
    """The segments of one rank, oldest first. Not thread-safe: its owner holds a lock."""

    def __init__(self, rank: int, *, limit: int = 8192) -> None:
        self.rank = rank
        self.segments: list[Segment] = []
        self.generation = 0
        """Goes up when old segments were merged, and with it all positions."""
        self.changed_from = 0
        """Position of the first segment that has changed since this was last set."""
        self.coarse_before = 0.0
        """Seconds since the cell's start before which segments are merged."""
        self.totals: dict[Activity, float] = {}
        """Seconds a rank spent on each activity; exact, whatever was merged."""
        self.longest_wait: LongestWait | None = None
        self._limit = limit

    def add(self, state: RankState, *, now: float, since: float | None = None) -> None:
        """Take in a sample.

        Args:
            state: The sample.
            now: When it was taken, in seconds since the cell's start.
            since: Since when the rank is in this activity and call, on the same clock; None: not known.
        """
        last = self.segments[-1] if self.segments else None
        now = max(now, last.end if last else 0.0)
        since = now if since is None else min(max(since, 0.0), now)
        if state.activity is Activity.WAITING:
            self._note_wait(now - since, state)
        if last is None:
            self._append(state, start=since, now=now, since=since)
            return
        self.changed_from = min(self.changed_from, len(self.segments) - 1)
        known = now - last.end <= SILENCE_S or last.activity in TERMINAL
        if last.holds(state) and (known or since <= last.end):
            self._count(last.activity, now - last.end)
            last.extend(now, since, state.line or 0)
            return
        # The sample says when the new activity began; the old one lasted until then.
        boundary = since if last.end <= since else now
        if known:
            self._count(last.activity, boundary - last.end)
            last.end = boundary
        self._append(state, start=boundary, now=now, since=since)

    def _append(self, state: RankState, *, start: float, now: float, since: float) -> None:
        line = state.line or 0
        self._count(state.activity, now - start)
        self.segments.append(Segment(start, now, state.activity, state.call, since, line, line, line))
        if len(self.segments) > self._limit:
            self._coarsen()

    def _count(self, activity: Activity, seconds: float) -> None:
        self.totals[activity] = self.totals.get(activity, 0.0) + seconds

    def _note_wait(self, seconds: float, state: RankState) -> None:
        if self.longest_wait is None or seconds > self.longest_wait.seconds:
            self.longest_wait = LongestWait(seconds, state.call, state.line or 0)

    def _coarsen(self) -> None:
        half = len(self.segments) // 4 * 2
        old, rest = self.segments[:half], self.segments[half:]
        merged = [_merge(old[i], old[i + 1]) for i in range(0, half, 2)]
        self.segments = merged + rest
        self.coarse_before = merged[-1].end
        self.generation += 1
        self.changed_from = 0

    def at_end(self, end: float) -> float:
        """Where the last segment ends when the cell ends, or is looked at, at `end`; all in seconds."""
        last = self.segments[-1]
        return max(end, last.end) if last.activity in TERMINAL or end - last.end <= SILENCE_S else last.end


def _merge(first: Segment, second: Segment) -> Segment:
    longer = first if first.end - first.start >= second.end - second.start else second
    return Segment(
        start=first.start,
        end=second.end,
        activity=longer.activity,
        call=longer.call,
        since=longer.since,
        line=longer.line,
        low=longer.low,
        high=longer.high,
        mixed=True,
    )


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
