"""The live area of a cell: one display, updated in place, for progress bars and unfinished lines."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from axon_nb.cluster.output.rows import METER_NAME
from axon_nb.cluster.output.sinks import Sink, label

__all__ = ["LiveArea", "LiveRow"]

EVERY_S = 0.1
_BYTES_PER_S = 200_000
"""Large areas are updated more seldom."""
_PAGE_ROWS = 100
"""With that many finished rows an area is left as it is, and another begins."""
_MAX_AREAS = 100
_STRAGGLE_S = 0.1
"""Ranks that do the same end their bars within this time of each other."""
_MAX_ROWS = 200
_MAX_WIDTH = 2000


class LiveRow(NamedTuple):
    """One row that may still change."""

    rank: int
    key: tuple[int, str, int]
    """Tells it from the other rows."""
    text: str
    order: int
    """Higher for what began later."""
    began_at: float = 0.0
    """In the clock's seconds."""
    ended: bool = False
    """Whether a newline has ended it for now; nested bars go down, and up again."""
    is_left: bool = False
    """Whether that is so long ago that it is about to be finished."""


class LiveArea:
    """Shows the rows that still change, one line a rank, equal ones merged; its last state stays.

    It stands where it was first shown. When all that it shows is finished and ordinary output has come below it,
    the next bar gets an area of its own further down, so that the output reads in order.
    """

    def __init__(self, sink: Sink) -> None:
        self.next_at = 0.0
        """When it may be updated again, in the clock's seconds."""
        self.stale = False
        """Whether it waits for that."""
        self._sink = sink
        self._fixed: list[tuple[list[int], str]] = []
        self._members: set[tuple[int, str, int]] = set()
        self._left: dict[tuple[int, str, int], str] = {}
        self._shown = ""
        self._display_id = ""
        self._num_areas = 0
        self._passed_by: int | None = None

    def passed(self, order: int) -> None:
        """Ordinary output was shown, below it; `order` is that of its first item."""
        if self._display_id and self._passed_by is None:
            self._passed_by = order

    def begins_at(self, rows: Sequence[LiveRow]) -> int | None:
        """Order of the first of the rows that it does not show yet; None: there is none."""
        return min((row.order for row in self._new(rows) if row.key not in self._members), default=None)

    def _new(self, rows: Sequence[LiveRow]) -> list[LiveRow]:
        # Without those that are finished but for a moment of waiting, in an area further up.
        return [row for row in rows if self._left.get(row.key) != row.text]

    def _is_over(self, rows: Sequence[LiveRow]) -> bool:
        if len(self._fixed) >= _PAGE_ROWS:
            return True
        if self._passed_by is None or self._num_areas >= _MAX_AREAS:
            return False
        begins = any(row.order > self._passed_by and row.key not in self._members for row in rows)
        return begins and all(row.is_left for row in self.members(rows))

    def members(self, rows: Sequence[LiveRow]) -> list[LiveRow]:
        """Those of the rows that it shows already."""
        return [row for row in rows if row.key in self._members]

    def fix(self, ranks: Sequence[int], text: str, key: tuple[int, str, int] | None = None) -> None:
        """A row that will not change any more; `key` when it was a live one."""
        if key is not None and self._left.pop(key, None) == text:
            return
        is_new = key is None and not (self._passed_by is None or self._members or self._num_areas >= _MAX_AREAS)
        if is_new or len(self._fixed) >= _PAGE_ROWS:
            self._leave(())
        self._members.discard(key or (-1, "", -1))
        self._add(ranks, text)

    def _add(self, ranks: Sequence[int], text: str) -> None:
        for others, other in reversed(self._fixed):
            if other == text and not set(ranks) & set(others):
                others[:] = sorted([*others, *ranks])
                return
        place = len(self._fixed)
        name = METER_NAME.match(text)
        while name and place and self._fixed[place - 1][0][0] > ranks[0]:
            before = METER_NAME.match(self._fixed[place - 1][1])
            if before is None or before.groups() != name.groups():
                break
            place -= 1
        self._fixed.insert(place, (list(ranks), text))

    def in_turn(self, rows: Sequence[LiveRow], before: float) -> list[LiveRow]:
        """The rows that it shows already, and those that began before what is still waiting to be shown."""
        return [row for row in rows if row.order < before or row.key in self._members]

    def show(self, rows: Sequence[LiveRow], now: float, *, at_once: bool = False) -> None:
        """Show the fixed rows and, below them, what is live now."""
        rows = self._new(rows)
        if self._display_id and self._is_over(rows):
            self._leave(rows)
            rows = self._new(rows)
        num_rows = len(rows)
        if self._passed_by is not None:
            rows = self._decided(rows, self._passed_by, now)
        waits = len(rows) < num_rows
        self._members = {row.key for row in rows}
        text = "\n".join(f"{label(ranks)} {_narrow(row)}" for ranks, row in [*self._fixed, *_merged(rows)])
        changed = text != self._shown
        if changed and (at_once or not self._display_id or now >= self.next_at):
            self._publish(text)
            self.next_at = now + max(EVERY_S, len(text) / _BYTES_PER_S)
            changed = False
        self.stale = changed or waits

    def _decided(self, rows: Sequence[LiveRow], passed_by: int, now: float) -> list[LiveRow]:
        # A bar that begins below other output belongs in an area of its own, unless the rank's bar up here goes on
        # (nested bars). When that bar has ended only just now, or those of other ranks are about to, it shows soon.
        here = {row.rank: row for row in self.members(rows) if not row.is_left}
        return [
            row
            for row in rows
            if row.key in self._members
            or row.order < passed_by
            or (not here[row.rank].ended if row.rank in here else not here or now - row.began_at > _STRAGGLE_S)
        ]

    def _publish(self, text: str) -> None:
        update = bool(self._display_id)
        if not update:
            self._display_id = f"axon_nb-live-{uuid.uuid4().hex}"
            self._num_areas += 1
            self._passed_by = None
        self._shown = text
        # Text alone: it looks like the streams around it, colours included, and takes no room when it is empty.
        self._sink.display({"text/plain": text}, {}, display_id=self._display_id, update=update)

    def _leave(self, rows: Sequence[LiveRow]) -> None:
        for row in rows:
            if row.is_left and (row.key in self._members or row.order < (self._passed_by or 0)):
                self._left[row.key] = row.text
                self._add([row.rank], row.text)
        text = "\n".join(f"{label(ranks)} {_narrow(row)}" for ranks, row in self._fixed)
        if text != self._shown:
            self._publish(text)
        self._fixed.clear()
        self._members.clear()
        self._shown = self._display_id = ""
        self._passed_by = None

    def cleared(self, ranks: Iterable[int]) -> None:
        """The cell's output was cleared; finished rows of ranks that did not want that are shown again."""
        gone = set(ranks)
        kept = [([rank for rank in others if rank not in gone], text) for others, text in self._fixed]
        self._fixed = [(others, text) for others, text in kept if others]
        self._members.clear()
        self._left.clear()
        self._shown = self._display_id = ""
        self._num_areas, self._passed_by = 0, None


def _merged(rows: Sequence[LiveRow]) -> list[tuple[list[int], str]]:
    merged: dict[tuple[str, int], list[int]] = {}
    counts: dict[tuple[int, str], int] = {}
    for rank, _, text, *_ in rows:
        # The second of two equal rows of a rank belongs with the second ones of the others.
        counts[rank, text] = nth = counts.get((rank, text), 0) + 1
        merged.setdefault((text, nth), []).append(rank)
    found = [(ranks, text) for (text, _), ranks in merged.items()]
    if len(found) > _MAX_ROWS:
        rest = sorted({rank for ranks, _ in found[_MAX_ROWS:] for rank in ranks})
        found[_MAX_ROWS:] = [(rest, "… more unfinished rows …")]
    return found


def _narrow(row: str) -> str:
    row = row.rstrip(" ")
    return row if len(row) <= _MAX_WIDTH else f"{row[:_MAX_WIDTH]}\x1b[0m …"
