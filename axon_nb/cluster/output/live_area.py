"""The live area of a cell: a display that is updated in place, for progress bars and unfinished lines."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from axon_nb.cluster.output.rows import METER_NAME
from axon_nb.cluster.output.sinks import Sink, label

UPDATE_INTERVAL_S = 0.1
_BYTES_PER_S = 200_000
"""Large areas are updated less often."""
_MAX_FINISHED_ROWS = 100
"""An area with this many finished rows is closed, and a new one starts."""
_MAX_AREAS = 100
_STRAGGLER_S = 0.1
"""Ranks that run the same code finish their bars within this time of each other."""
_MAX_ROWS = 200
_MAX_WIDTH = 2000


class LiveRow(NamedTuple):
    """One row that may still change."""

    rank: int
    key: tuple[int, str, int]
    """Unique among the rows."""
    text: str
    order: int
    """Higher for rows that started later."""
    started_at: float = 0.0
    """In the clock's seconds."""
    ended: bool = False
    """Whether the cursor has moved below it; nested bars may move up again."""
    is_left: bool = False
    """Whether that happened so long ago that the row is about to be finished."""


class LiveArea:
    """Shows the rows that still change, one line per rank, with equal rows merged; its last state stays.

    The area stays where it was first shown. If all its rows are finished and ordinary output was shown below it, the
    next bar gets a new area further down, so that the output reads in order.
    """

    def __init__(self, sink: Sink) -> None:
        self.next_at = 0.0
        """When it may be updated again, in the clock's seconds."""
        self.stale = False
        """Whether an update is waiting for that."""
        self._sink = sink
        self._finished: list[tuple[list[int], str]] = []
        self._closed: deque[tuple[list[int], str]] = deque(maxlen=_MAX_FINISHED_ROWS)
        """The last rows of areas that are closed."""
        self._members: set[tuple[int, str, int]] = set()
        self._left: dict[tuple[int, str, int], str] = {}
        self._shown = ""
        self._display_id = ""
        self._num_areas = 0
        self._output_below: int | None = None
        """Order of the first ordinary output below the area; None: there is none."""

    def output_shown(self, order: int) -> None:
        """Record that ordinary output was shown below the area; `order` is that of its first item."""
        if self._display_id and self._output_below is None:
            self._output_below = order

    def next_row_order(self, rows: Sequence[LiveRow]) -> int | None:
        """Return the order of the first row that the area does not show yet; None: there is none."""
        return min((row.order for row in self._unfinished(rows) if row.key not in self._members), default=None)

    def _unfinished(self, rows: Sequence[LiveRow]) -> list[LiveRow]:
        # Rows that a closed area already shows in their final state are finished, although they have not settled yet.
        return [row for row in rows if self._left.get(row.key) != row.text]

    def _must_close(self, rows: Sequence[LiveRow]) -> bool:
        if len(self._finished) >= _MAX_FINISHED_ROWS:
            return True
        if self._output_below is None or self._num_areas >= _MAX_AREAS:
            return False
        has_new = any(row.order > self._output_below and row.key not in self._members for row in rows)
        return has_new and all(row.is_left for row in self.members(rows))

    def members(self, rows: Sequence[LiveRow]) -> list[LiveRow]:
        """Return the rows that the area already shows."""
        return [row for row in rows if row.key in self._members]

    def finish(self, ranks: Sequence[int], text: str, key: tuple[int, str, int] | None = None) -> None:
        """Add a row that will not change any more; `key` is given if it was a live row."""
        if key is not None and self._left.pop(key, None) == text:
            return
        is_new = key is None and not (self._output_below is None or self._members or self._num_areas >= _MAX_AREAS)
        if is_new or len(self._finished) >= _MAX_FINISHED_ROWS:
            self._close(())
        self._members.discard(key or (-1, "", -1))
        self._add(ranks, text)

    def _add(self, ranks: Sequence[int], text: str) -> None:
        for others, other in reversed(self._finished):
            if other == text and not set(ranks) & set(others):
                others[:] = sorted([*others, *ranks])
                return
        index = len(self._finished)
        name = METER_NAME.match(text)
        while name and index and self._finished[index - 1][0][0] > ranks[0]:
            before = METER_NAME.match(self._finished[index - 1][1])
            if before is None or before.groups() != name.groups():
                break
            index -= 1
        self._finished.insert(index, (list(ranks), text))

    def showable(self, rows: Sequence[LiveRow], before: float) -> list[LiveRow]:
        """Return the rows that the area already shows, and those that started before the output still pending."""
        return [row for row in rows if row.order < before or row.key in self._members]

    def show(self, rows: Sequence[LiveRow], now: float, *, force: bool = False) -> None:
        """Show the finished rows and, below them, the live ones; with `force` regardless of the update interval."""
        rows = self._unfinished(rows)
        if self._display_id and self._must_close(rows):
            self._close(rows)
            rows = self._unfinished(rows)
        num_rows = len(rows)
        if self._output_below is not None:
            rows = self._rows_of_this_area(rows, self._output_below, now)
        has_waiting = len(rows) < num_rows
        self._members = {row.key for row in rows}
        text = "\n".join(f"{label(ranks)} {_truncate(row)}" for ranks, row in [*self._finished, *_merged(rows)])
        changed = text != self._shown
        if changed and (force or not self._display_id or now >= self.next_at):
            self._publish(text)
            self.next_at = now + max(UPDATE_INTERVAL_S, len(text) / _BYTES_PER_S)
            changed = False
        self.stale = changed or has_waiting

    def _rows_of_this_area(self, rows: Sequence[LiveRow], output_below: int, now: float) -> list[LiveRow]:
        # A bar that starts below other output gets a new area, unless the rank's bar in this area is still running
        # (nested bars). If that bar ended just now, or bars of other ranks are about to end, the new bar waits.
        running = {row.rank: row for row in self.members(rows) if not row.is_left}
        return [
            row
            for row in rows
            if row.key in self._members
            or row.order < output_below
            or (
                not running[row.rank].ended
                if row.rank in running
                else not running or now - row.started_at > _STRAGGLER_S
            )
        ]

    def _publish(self, text: str) -> None:
        update = bool(self._display_id)
        if not update:
            self._display_id = f"axon_nb-live-{uuid.uuid4().hex}"
            self._num_areas += 1
            self._output_below = None
        self._shown = text
        # Plain text looks like the streams around it, including colours, and takes no space when it is empty.
        self._sink.display({"text/plain": text}, {}, display_id=self._display_id, update=update)

    def _close(self, rows: Sequence[LiveRow]) -> None:
        for row in rows:
            if row.is_left and (row.key in self._members or row.order < (self._output_below or 0)):
                self._left[row.key] = row.text
                self._add([row.rank], row.text)
        text = "\n".join(f"{label(ranks)} {_truncate(row)}" for ranks, row in self._finished)
        if text != self._shown:
            self._publish(text)
        self._closed += self._finished
        self._finished.clear()
        self._members.clear()
        self._shown = self._display_id = ""
        self._output_below = None

    def includes(self, ranks: set[int]) -> bool:
        """Whether a row of one of the ranks is shown."""
        finished = any(rank in ranks for others, _ in [*self._closed, *self._finished] for rank in others)
        return finished or any(rank in ranks for rank, _, _ in self._members)

    def clear(self, ranks: Iterable[int]) -> None:
        """Start over after the cell's output was cleared by `ranks`; finished rows of other ranks are shown again."""
        cleared, finished = set(ranks), [*self._closed, *self._finished]
        self._closed.clear()
        remaining = [([rank for rank in others if rank not in cleared], text) for others, text in finished]
        self._finished = [(others, text) for others, text in remaining if others]
        self._members.clear()
        self._left.clear()
        self._shown = self._display_id = ""
        self._num_areas, self._output_below = 0, None


def _merged(rows: Sequence[LiveRow]) -> list[tuple[list[int], str]]:
    merged: dict[tuple[str, int], list[int]] = {}
    counts: dict[tuple[int, str], int] = {}
    for rank, _, text, *_ in rows:
        # If a rank has two equal rows, the second one is merged with the second ones of other ranks.
        counts[rank, text] = nth = counts.get((rank, text), 0) + 1
        merged.setdefault((text, nth), []).append(rank)
    lines = [(ranks, text) for (text, _), ranks in merged.items()]
    if len(lines) > _MAX_ROWS:
        rest = sorted({rank for ranks, _ in lines[_MAX_ROWS:] for rank in ranks})
        lines[_MAX_ROWS:] = [(rest, "… more unfinished rows …")]
    return lines


def _truncate(row: str) -> str:
    row = row.rstrip(" ")
    return row if len(row) <= _MAX_WIDTH else f"{row[:_MAX_WIDTH]}\x1b[0m …"
