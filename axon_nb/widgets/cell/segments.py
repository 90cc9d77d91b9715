"""What a rank did during a cell: samples merged into segments, bounded however long the cell runs.

They travel to the browser as a JSON header and columns, which `static/strip/store.js` reads.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from axon_nb.records.telemetry import Activity, RankState
from axon_nb.widgets.palette import ACTIVITY_CODES

SILENCE_S = 2.0
"""Seconds without a sample after which the rank's activity is unknown."""

TERMINAL = frozenset({Activity.DONE, Activity.FAILED, Activity.DEAD, Activity.STOPPED})
"""Activities after which a rank does nothing more in the cell: they last until it ends."""

_IN_CALL = frozenset({Activity.COLLECTIVE, Activity.WAITING})


@dataclass(slots=True)
class Segment:
    """A period of one activity; all times in seconds since the cell's start."""

    start: float
    end: float
    """Time of its last sample, or of the change to the next activity."""
    activity: Activity
    call: str
    since: float
    """Start of the call that it is in; may be before `start`."""
    line: int
    """Line of the cell at the last sample; 0: unknown."""
    low: int
    """First line seen; 0: unknown."""
    high: int
    """Last line seen; 0: unknown."""
    mixed: bool = False
    """Whether shorter segments were merged into it: it shows the activity that took most of the time."""

    def matches(self, state: RankState) -> bool:
        """Whether the sample has the same activity, and in a call also the same line."""
        if state.activity is not self.activity or state.call != self.call or self.mixed:
            return False
        return self.activity not in _IN_CALL or (state.line or 0) == self.line

    def extend(self, now: float, since: float, line: int) -> None:
        """Add a sample."""
        self.end, self.since, self.line = now, since, line
        if line:
            self.low, self.high = min(self.low or line, line), max(self.high, line)


@dataclass(frozen=True, slots=True)
class LongestWait:
    """The longest time that a rank was in one communication call."""

    seconds: float
    call: str
    line: int
    """Line of the cell; 0: unknown."""


class RankHistory:
    """The segments of one rank, oldest first. Not thread-safe: its owner holds a lock."""

    def __init__(self, rank: int, *, limit: int = 8192) -> None:
        self.rank = rank
        self.segments: list[Segment] = []
        self.generation = 0
        """Increases when old segments are merged, which changes all positions."""
        self.changed_from = 0
        """Position of the first segment that has changed since this was last set."""
        self.coarse_before = 0.0
        """Seconds since the cell's start before which segments are merged."""
        self.totals: dict[Activity, float] = {}
        """Seconds that the rank spent on each activity; exact, even if segments were merged."""
        self.longest_wait: LongestWait | None = None
        self._limit = limit

    def add(self, state: RankState, *, now: float, since: float | None = None) -> None:
        """Add a sample.

        Args:
            state: The sample.
            now: When it was taken, in seconds since the cell's start.
            since: Since when the rank has been in this activity and call, on the same clock; None: unknown.
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
        is_known = now - last.end <= SILENCE_S or last.activity in TERMINAL
        if last.activity is Activity.IDLE and state.activity in TERMINAL:
            is_known = False  # in a short cell no sample came in between: the rank ran it, and was not idle
        if last.matches(state) and (is_known or since <= last.end):
            self._count(last.activity, now - last.end)
            last.extend(now, since, state.line or 0)
            return
        # The sample says when the new activity started; the old one lasted until then.
        boundary = since if last.end <= since else now
        if is_known:
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

    def last_end(self, end: float) -> float:
        """Return when the last segment ends if the cell ends, or is drawn, at `end`; all in seconds."""
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
    """What a message says about the whole strip."""

    now: float
    """Seconds since the cell's start."""
    lost: int
    """Samples dropped so far."""
    finished: bool
    """Whether the cell is over."""


def encode(histories: Sequence[RankHistory], clock: Clock, *, starts: Sequence[int]) -> bytes:
    """Pack segments.

    Args:
        histories: One per row of the strip.
        clock: The strip as a whole.
        starts: First segment to send, per row; 0 replaces all segments of that row in the browser.

    Returns:
        Header length (uint32) and 4 zero bytes; the header, padded to 8 bytes; then the columns of all segments,
        little-endian: start, end, since (float64, seconds), position, line, low, high (uint32), row, call (uint16),
        activity, mixed (uint8).
    """
    selected = [
        (row, position, segment)
        for row, (history, first) in enumerate(zip(histories, starts, strict=True))
        for position, segment in enumerate(history.segments[first:], start=first)
    ]
    calls = {name: number for number, name in enumerate(dict.fromkeys(segment.call for _, _, segment in selected))}
    header = {
        "count": len(selected),
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
    return struct.pack("<II", len(text), 0) + text + b"".join(_columns(selected, calls))


def _columns(selected: Sequence[tuple[int, int, Segment]], calls: dict[str, int]) -> list[bytes]:
    count = len(selected)
    segments = [segment for _, _, segment in selected]
    return [
        struct.pack(f"<{count}d", *(segment.start for segment in segments)),
        struct.pack(f"<{count}d", *(segment.end for segment in segments)),
        struct.pack(f"<{count}d", *(segment.since for segment in segments)),
        struct.pack(f"<{count}I", *(position for _, position, _ in selected)),
        struct.pack(f"<{count}I", *(segment.line for segment in segments)),
        struct.pack(f"<{count}I", *(segment.low for segment in segments)),
        struct.pack(f"<{count}I", *(segment.high for segment in segments)),
        struct.pack(f"<{count}H", *(row for row, _, _ in selected)),
        struct.pack(f"<{count}H", *(calls[segment.call] for segment in segments)),
        struct.pack(f"<{count}B", *(ACTIVITY_CODES[segment.activity] for segment in segments)),
        struct.pack(f"<{count}B", *(segment.mixed for segment in segments)),
    ]
