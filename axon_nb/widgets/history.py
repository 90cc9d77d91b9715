"""What one rank did during a cell: samples merged into segments, bounded however long the cell runs."""

from __future__ import annotations

from dataclasses import dataclass

from axon_nb.records.state import Activity, RankState

__all__ = ["SILENCE_S", "TERMINAL", "LongestWait", "RankHistory", "Segment"]

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
