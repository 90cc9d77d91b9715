"""What ranks did during a cell: samples merged into segments, and their picture, table and text, which are saved.

The segments are bounded however long the cell runs. They travel to the browser as a JSON header and columns, which
`static/strip/store.js` reads. Pictures look right on light and dark pages: they have shapes only; text is left to the
page around them.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from msgspec import Struct

from axon_nb.records.telemetry import Activity, RankState
from axon_nb.records.units import format_seconds
from axon_nb.widgets import html

SILENCE_S = 2.0
"""Seconds without a sample after which the rank's activity is unknown."""
TERMINAL = frozenset({Activity.DONE, Activity.FAILED, Activity.DEAD, Activity.STOPPED})
"""Activities after which a rank does nothing more in the cell: they last until it ends."""
_IN_CALL = frozenset({Activity.COLLECTIVE, Activity.WAITING})
WIDTH = 600
"""Width of a row's picture, in units; nothing shorter than one unit is drawn."""
_ROW_HEIGHT = 16
_TITLES = ("", "", "at the end", "running", "in collectives", "longest call")
_PICTURE = "display:block;width:100%;min-width:90px;max-width:none;height:16px;margin:0"
_MAX_ROWS = 64
_MEASURED = (("running", (Activity.RUNNING,)), ("in collectives", (Activity.COLLECTIVE, Activity.WAITING)))
"""Times by name. Samples do not tell a transfer from the wait for the last rank, as a timeline does."""


class Segment(Struct):
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


class LongestWait(Struct, frozen=True):
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


class Clock(Struct, frozen=True):
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
        struct.pack(f"<{count}B", *(html.ACTIVITY_CODES[segment.activity] for segment in segments)),
        struct.pack(f"<{count}B", *(segment.mixed for segment in segments)),
    ]


def row_svg(history: RankHistory, end: float) -> str:
    """Draw the strip of one rank from 0 to `end` seconds; `WIDTH` x 16 units, and it may be stretched."""
    shapes: dict[int, list[tuple[int, int]]] = {}
    for left, right, code in _runs(history, end):
        shapes.setdefault(code, []).append((left, right))
    return html.svg(WIDTH, _ROW_HEIGHT, "".join(_shape(html.ACTIVITIES[code], shapes[code]) for code in sorted(shapes)))


def swatch_svg(paint: html.ActivityPaint) -> str:
    """Draw a sample of one paint for a legend, 24 x 16 units."""
    return html.svg(24, _ROW_HEIGHT, _shape(paint, [(0, 24)]))


def _runs(history: RankHistory, end: float) -> Iterator[tuple[int, int, int]]:
    """Yield (left, right, code) of the intervals in which one activity takes most of each unit of the width."""
    if not history.segments or end <= 0:
        return
    shares = [[0.0] * len(html.ACTIVITIES) for _ in range(WIDTH)]
    last = history.segments[-1]
    for segment in history.segments:
        code = html.ACTIVITY_CODES[segment.activity]
        segment_end = history.last_end(end) if segment is last else segment.end
        left, right = (min(seconds / end, 1.0) * WIDTH for seconds in (segment.start, segment_end))
        for x in range(int(left), min(WIDTH, int(right) + 1)):
            shares[x][code] += max(0.0, min(right, x + 1) - max(left, x))
    start, current = 0, -1
    for x, share in enumerate(shares):
        largest = max(share)
        code = share.index(largest) if largest > 0.02 else -1
        if code != current:
            if current >= 0:
                yield start, x, current
            start, current = x, code
    if current >= 0:
        yield start, WIDTH, current


def _shape(paint: html.ActivityPaint, spans: list[tuple[int, int]]) -> str:
    color = paint.color.both
    middle = "".join(f"M{left} 8h{right - left}" for left, right in spans)
    line = f'<path d="{middle}" stroke="{color}" stroke-width="2"/>'
    if paint.form == "line":
        return line
    if paint.form in ("hollow", "cross"):
        path = "".join(f"M{left + 0.5} 4.5h{right - left - 1}v7h-{right - left - 1}z" for left, right in spans)
        return f'<path d="{path}" fill="none" stroke="{color}"/>{line if paint.form == "cross" else ""}'
    path = "".join(f"M{left} 2h{right - left}v12h-{right - left}z" for left, right in spans)
    if paint.form == "wait":
        foot = "".join(f"M{left} 13h{right - left}" for left, right in spans)
        return (
            f'<path d="{path}" fill="{color}" fill-opacity=".25"/><path d="{foot}" stroke="{color}" stroke-width="2"/>'
        )
    return f'<path d="{path}" fill="{color}"/>'


def strip_bundle(histories: Sequence[RankHistory], *, title: str, end: float, lost: int) -> dict[str, str]:
    """Return a strip as a picture with a table, and as text.

    Args:
        histories: One per rank.
        title: What ran, such as ``In [3]``.
        end: Length of the cell in seconds.
        lost: Samples that did not arrive.

    Returns:
        A MIME bundle: `text/html` without scripts or references, `text/plain`.
    """
    count = f"{len(histories)} rank{'' if len(histories) == 1 else 's'}"
    heading = ", ".join(filter(None, ("Activity", title, count, format_seconds(end))))
    shown = _standing_out(histories)
    notes = [*_omitted(histories, shown), *_notes(histories, lost)]
    summaries = (f"  rank {history.rank}: {_summary(history, end)}" for history in shown)
    return {
        "text/html": _page_html(shown, heading, notes, end),
        "text/plain": "\n".join([heading, *summaries, *notes]),
    }


def _standing_out(histories: Sequence[RankHistory]) -> list[RankHistory]:
    """Return at most 64 ranks: those that ended otherwise than most, then those that waited least.

    The latter are the ones for which others wait.
    """
    if len(histories) <= _MAX_ROWS:
        return list(histories)
    ends = Counter(map(_last_activity, histories))
    most = max(ends, key=lambda activity: ends[activity])

    def is_ordinary(history: RankHistory) -> tuple[bool, float]:
        waited = history.totals.get(Activity.WAITING, 0.0) + history.totals.get(Activity.COLLECTIVE, 0.0)
        return _last_activity(history) is most, waited

    return sorted(sorted(histories, key=is_ordinary)[:_MAX_ROWS], key=lambda history: history.rank)


def _last_activity(history: RankHistory) -> Activity | None:
    return history.segments[-1].activity if history.segments else None


def _omitted(histories: Sequence[RankHistory], shown: Sequence[RankHistory]) -> list[str]:
    count = len(histories) - len(shown)
    if not count:
        return []
    what = "those that ended otherwise than most, and then those that waited least"
    return [f"{count} of {len(histories)} ranks are left out; shown are {what}."]


def end_text(history: RankHistory, end: float) -> str:
    """Describe a rank at the end of its cell, such as ``done after 12.1 s``; `end` is the cell's length in seconds."""
    if not history.segments:
        return "no sample"
    last = history.segments[-1]
    verb = {Activity.DONE: "done", Activity.FAILED: "failed", Activity.DEAD: "died"}.get(last.activity)
    if verb:
        return f"{verb} after {format_seconds(last.start)}"
    line = f", line {last.line}" if last.line else ""
    if last.activity is Activity.STOPPED:
        return f"stopped{f' in {last.call}' if last.call else ''}{line}"
    last_end = history.last_end(end)
    silent = f", no sample for {format_seconds(end - last_end)}" if last_end < end else ""
    if last.activity is Activity.WAITING:
        return f"waiting in {last.call}{line}, {format_seconds(last_end - last.since)}{silent}"
    if last.activity is Activity.COLLECTIVE:
        return f"in {last.call}{line}{silent}"
    return f"{last.activity.value}{line if last.activity in (Activity.RUNNING, Activity.PAUSED) else ''}{silent}"


def _summary(history: RankHistory, end: float) -> str:
    parts = [
        f"{label} {_total(history, activities)}"
        for label, activities in _MEASURED
        if any(history.totals.get(activity) for activity in activities)
    ]
    if history.longest_wait:
        parts.append(f"longest call {_longest_wait(history)}")
    return "; ".join([end_text(history, end), *parts])


def _total(history: RankHistory, activities: Iterable[Activity]) -> str:
    seconds = sum(history.totals.get(activity, 0.0) for activity in activities)
    return format_seconds(seconds) if seconds else "–"


def _longest_wait(history: RankHistory) -> str:
    longest = history.longest_wait
    if longest is None:
        return "–"
    return f"{format_seconds(longest.seconds)} in {longest.call}" + (f", line {longest.line}" if longest.line else "")


def _notes(histories: Sequence[RankHistory], lost: int) -> list[str]:
    notes = []
    coarse = max((history.coarse_before for history in histories), default=0.0)
    if coarse:
        notes.append(f"Before {format_seconds(coarse)}, short segments are merged; the table counts them exactly.")
    if lost:
        notes.append(f"{lost} sample{'' if lost == 1 else 's'} lost.")
    return notes


def _page_html(histories: Sequence[RankHistory], heading: str, notes: Sequence[str], end: float) -> str:
    rest = f'<td colspan="{len(_TITLES) - 2}" style="{html.CELL}"></td>'
    axis = html.table_row(f'<td style="{html.CELL}"></td><td style="{html.CELL}">{html.time_axis(end)}</td>{rest}')
    rows = [*(_page_row(history, end) for history in histories), axis]
    ranks = html.table(_TITLES, rows, style=html.table_style(widths=(480, 1200)))
    return html.figure(f"{ranks}{html.note_lines(notes)}", heading=heading, beside=_legend(histories))


def _legend(histories: Sequence[RankHistory]) -> str:
    seen = {segment.activity for history in histories for segment in history.segments}
    return html.legend((swatch_svg(paint), paint.label) for paint in html.ACTIVITIES if paint.activity in seen)


def _page_row(history: RankHistory, end: float) -> str:
    cells = (end_text(history, end), *(_total(history, activities) for _, activities in _MEASURED))
    text = f"rank {history.rank}: {_summary(history, end)}"
    return html.table_row(
        html.row_title(f"rank {history.rank}"),
        f'<td style="{html.CELL};width:99%"><img alt="{escape(text)}" src="{html.svg_uri(row_svg(history, end))}" '
        f'width="{WIDTH}" height="16" style="{_PICTURE}"></td>',
        html.data_cells(cells),
        html.data_cells([_longest_wait(history)], html.WRAPPED_CELL),
    )
