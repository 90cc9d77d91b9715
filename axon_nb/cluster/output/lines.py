"""Assembles text that arrives in pieces into finished lines and rows that still change (progress bars).

Of the control sequences in a row, some are kept, some interpreted and some removed.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

PARTIAL_S = 0.15
"""A line without a newline is shown after this time."""
SETTLE_S = 0.15
"""How long a bar or an empty row may change after the cursor left it: nested bars move down and up again."""
_MAX_ROWS = 64
_MOVE_S = 0.005
"""Moving down and up again takes several messages, which arrive within this time."""
_CSI = r"\x1b\[[0-9;:<=>?]*[ -/]*[@-~]"
_OSC = r"\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)"
_OTHER = r"\x1b[()*+][0-9A-Za-z]|\x1b[0-9<-Zc-z|}~]"
CONTROL = re.compile(rf"(\n|\r|\x08+|{_CSI}|{_OSC}|{_OTHER})")
"""Splits text into plain pieces, at even indices, and the control sequences between them."""
HAS_CONTROL = re.compile(r"[\r\x08]|\x1b(?!\[[0-9;:]*m)")
"""Matches text with control sequences other than newlines and colours."""
INCOMPLETE = re.compile(r"\x1b(?:\[[0-9;:<=>?]{0,32}|\][^\x07\x1b\n]{0,2048}\x1b?|[()*+])?\Z")
"""Matches an incomplete sequence at the end of text; the rest arrives with the next piece."""
METER = re.compile(r".*\[(?:[0-9]+:)?[0-9]+:[0-9]{2}[<,][^\[\]]*\](?:\x1b\[[0-9;:]*m)*")
"""Matches a row of tqdm up to its end: ``… 3/10 [00:01<00:02, 2.9it/s]``."""
METER_NAME = re.compile(r"\s*(.*?)\s*[0-9]+%\|.*[^0-9][0-9.]+\S*?/(\S+) \[")
"""Matches the description and the total in a row of tqdm, which are the same in all states of a bar."""
COLOUR = re.compile(r"\x1b\[([0-9;:]*)m")
_ALL_BUT_COLOUR = re.compile(rf"(?!{COLOUR.pattern})(?:[\r\x08]|{_CSI}|{_OSC}|{_OTHER}|\x1b)")
_RESETS = frozenset({"", "0", "00"})
MAX_LINE = 65536
"""Maximum number of characters in a line; a longer one is truncated, with a note at its end."""


class LineAssembler:
    """Assembles one stream of one rank; interprets the few control sequences that progress bars use."""

    def __init__(self) -> None:
        self.order = 0
        """The highest order assigned so far."""
        self._num_created = 0
        self._rows: list[Row] = []
        self._cursor = 0
        self._incomplete = ""
        self._has_bars = False
        self._blanked: deque[int] = deque(maxlen=8)
        self._lines: list[Finished] = []
        self._message = 0
        self._start(0.0)

    def _start(self, now: float) -> Row:
        self.order += 1
        row = Row(self._num_created, self.order, now, now)
        self._num_created += 1
        self._rows.append(row)
        return row

    def feed(self, text: str, now: float, order: int = 0) -> Sequence[Finished]:
        """Process text; return the rows that it finishes.

        Args:
            text: The next piece, of any length.
            now: The time in seconds.
            order: The highest order assigned to earlier output.
        """
        self.order, self._message = order, self._message + 1
        if self._incomplete:
            text, self._incomplete = self._incomplete + text, ""
        if "\r\n" in text:
            text = text.replace("\r\n", "\n")
        row = self._rows[0]
        if len(self._rows) == 1 and not (row.bar or row.returned or row.at_start) and not HAS_CONTROL.search(text):
            return self._feed_lines(text, now)
        if match := INCOMPLETE.search(text):
            text, self._incomplete = text[: match.start()], match.group()
        for i, piece in enumerate(CONTROL.split(text)):
            if i % 2:
                self._apply(piece, now)
            elif piece := piece.replace("\x1b", ""):  # an escape that starts no known sequence
                self._write(self._rows[self._cursor], piece, now)
        return self.settle(now)

    def _feed_lines(self, text: str, now: float) -> Sequence[Finished]:
        *lines, rest = text.split("\n")
        num_empty = 0
        if lines and not rest and not lines[-1]:
            # Empty lines at the end may be the way down to a bar.
            lines = text.rstrip("\n").split("\n") if text.strip("\n") or self._rows[0].text else []
            num_empty = text.count("\n") - len(lines)
        finished = []
        if lines:
            row = self._rows[0]
            if row.text:
                append(row, lines[0])
                finished.append(Finished(row.shown_text(), number=row.number if row.shown else -1, order=row.order))
                lines = lines[1:]
            finished += [Finished(complete_line(line), order=self.order + 1 + i) for i, line in enumerate(lines)]
            self.order += len(lines)
            self._rows.clear()
            self._start(now)
        if rest:
            self._write(self._rows[0], rest, now)
        for _ in range(num_empty):
            self._apply("\n", now)
        return finished

    def _apply(self, piece: str, now: float) -> None:
        row = self._rows[self._cursor]
        if piece == "\n":
            if (row.bar or row.returned) and (line := split_foreign_text(row)):
                self.order += 1
                self._lines.append(Finished(close_colours(line), order=self.order))
                return
            row.changed_at = now
            self._cursor += 1
            if row.bar:
                self._drop_older_states(row)
            if self._cursor == len(self._rows):
                self._start(now)
            self._rows[self._cursor].entered = True
            if len(self._rows) > _MAX_ROWS:
                self._lines = self.settle(now)
        elif piece == "\r":
            self._return(row)
        elif piece[0] == "\b":
            row.text, row.joined_at = row.text[: -len(piece)], -1
            row.bar = row.erased = True
        elif piece[1] == "[" and piece[-1] == "m":
            self._write(row, piece, now)
        elif piece[1] == "[":
            self._move_or_erase(row, piece[-1], piece[2:-1], now)

    def _return(self, row: Row) -> None:
        row.entered = False
        if not row.text or row.text.strip():
            row.at_start = True
            return
        # A bar was blanked out, as tqdm does before it writes a line: what follows is not a bar, and the next bar is
        # this one again.
        if row.bar:
            self._blanked.append(row.number)
        self._reset(row)

    def _reset(self, row: Row) -> None:
        row.text, row.num_truncated, row.number = "", 0, self._num_created
        row.bar = row.erased = row.at_start = row.returned = row.shown = row.entered = False
        self._num_created += 1

    def _move_or_erase(self, row: Row, command: str, argument: str, now: float) -> None:
        count = int(argument) if argument.isdecimal() and len(argument) < 5 else 0
        if command in "AF":
            up = max(0, self._cursor - max(1, count))
            for passed in self._rows[up : self._cursor]:
                passed.stepped_over, passed.bar = True, passed.bar or passed.returned
            self._cursor = up
        elif command in "BE":
            self._cursor = min(len(self._rows) - 1, self._cursor + max(1, count))
        if command in "EF" or (command == "G" and count <= 1):
            self._return(self._rows[self._cursor])
        # This erases from the cursor on, or the whole row. The cursor is at the end of the text or, after a return, at
        # its start.
        if command in "KJ" and (row.at_start or count == 2):
            row.bar, row.erased = row.bar or bool(row.text), True
            row.text, row.num_truncated, row.at_start, row.changed_at = "", 0, False, now
            if command == "J":
                del self._rows[self._cursor + 1 :]

    def _write(self, row: Row, text: str, now: float) -> None:
        if row.entered:
            self._reset(row)
        if row.at_start:
            if self._blanked and not row.bar and not row.text:
                row.number = self._blanked.popleft()
            # Once this stream has shown a bar, what follows a return on an empty row is a bar, too.
            row.bar = row.bar or bool(row.text) or self._has_bars
            row.erased, row.last_length = row.erased and not row.text, len(row.text)
            row.text, row.num_truncated, row.joined_at, row.at_start, row.returned = "", 0, 0, False, True
            self._has_bars = self._has_bars or row.bar
        if not row.text:
            row.written_by = self._message
            if not row.shown:
                self.order += 1
                row.started_at, row.order = now, self.order
        elif row.written_by != self._message and not row.joined_at:
            row.joined_at = len(row.text)
        row.changed_at = now
        append(row, text)
        if row.returned and not row.bar and METER.match(row.text):
            row.bar = self._has_bars = True

    def settle(self, now: float, *, final: bool = False) -> list[Finished]:
        """Remove and return the rows at the top that will not change any more; with `final` all rows."""
        finished, self._lines = self._lines, []
        while self._rows and (self._cursor > 0 or final):
            row = self._rows[0]
            waits = row.bar or row.returned or not row.text
            if waits and not final and now - row.changed_at < SETTLE_S and not self._is_out_of_reach():
                break
            ended = self._cursor > 0
            if row.text.strip() or (not row.bar and not row.stepped_over and (ended or row.text)):
                bar, number = row.bar and not row.erased, row.number if row.shown else -1
                finished.append(Finished(row.shown_text(), bar, ended, number, row.order))
            del self._rows[0]
            self._cursor -= 1
        if not self._rows:
            self._start(now)
            self._cursor, self._incomplete = 0, ""
        return finished

    def _drop_older_states(self, row: Row) -> None:
        # tqdm draws a finished bar at the top, and leaves its previous state where the bar was.
        if name := METER_NAME.match(row.text):
            for other in self._rows[self._cursor :]:
                match = METER_NAME.match(other.text) if other.bar else None
                if match and match.groups() == name.groups():
                    row.number, row.shown = other.number, row.shown or other.shown
                    self._reset(other)

    def _is_out_of_reach(self) -> bool:
        # No program moves up over an ordinary line to change a bar above it.
        rows = self._rows[1 : self._cursor]
        return len(self._rows) > _MAX_ROWS or any(row.text and not row.bar for row in rows)

    def live_rows(self, now: float) -> list[Row]:
        """Return the rows to show although they may change: bars, and lines unfinished for `PARTIAL_S` seconds."""
        rows = [row for row in self._rows if row.text.strip() and (row.bar or now - row.started_at >= PARTIAL_S - 1e-6)]
        for row in rows:
            row.shown = True
        return rows

    def has_left(self, row: Row, now: float) -> tuple[bool, bool]:
        """Return whether the cursor has moved below the row, and whether so long ago that the row is about finished."""
        ended = self._rows.index(row) < self._cursor
        return ended, ended and now - row.changed_at >= _MOVE_S

    def next_change(self) -> float | None:
        """Return when `settle` or `live_rows` will change without new text, in the clock's seconds; None: never."""
        times = [
            row.changed_at + SETTLE_S if i < self._cursor else row.started_at + PARTIAL_S
            for i, row in enumerate(self._rows)
            if i < self._cursor or (row.text.strip() and not (row.bar or row.shown))
        ]
        return min(times, default=None)

    @property
    def is_live(self) -> bool:
        """Whether a row that may still change is shown, or can be shown at once."""
        return any(row.bar or row.shown for row in self._rows)

    @property
    def unfinished(self) -> str:
        """The text of the rows that may still change, as lines."""
        return "\n".join(row.shown_text() for row in self._rows if row.text)


def close_colours(line: str) -> str:
    """Return the line with its colours reset at its end."""
    if "\x1b" not in line:
        return line
    colours = COLOUR.findall(line)
    return line + "\x1b[0m" if colours and colours[-1] not in _RESETS else line


def strip_control(text: str) -> str:
    """Remove all control sequences except newlines and colours."""
    return _ALL_BUT_COLOUR.sub("", text.replace("\r\n", "\n")) if HAS_CONTROL.search(text) else text


class Row(Struct, eq=False):
    """A row that is not finished yet."""

    number: int
    """Unique among the rows of its stream."""
    order: int
    """Higher for rows that started later, in any stream."""
    started_at: float
    """In seconds, like `changed_at`."""
    changed_at: float
    text: str = ""
    num_truncated: int = 0
    """Number of characters beyond the limit."""
    bar: bool = False
    """Whether it was overwritten, as progress bars are."""
    erased: bool = False
    """Whether it was erased by a control sequence and then written once: it may be an ordinary line."""
    at_start: bool = False
    """Whether the cursor is at its start after a return, so that the next text replaces it."""
    entered: bool = False
    """Whether the cursor has just moved down to its start: new text is a new line, unless it belongs to a bar."""
    stepped_over: bool = False
    """Whether the cursor moved up over it: if it is empty, it is not a line but space between bars."""
    returned: bool = False
    """Whether its text started after a return, as that of bars does."""
    written_by: int = 0
    """Number of the message that wrote its text."""
    joined_at: int = 0
    """Index in a bar's text at which a later message continued without a return; 0: none, -1: unknown."""
    last_length: int = 0
    """Length of the overwritten text."""
    shown: bool = False
    """Whether it was shown while unfinished."""

    def shown_text(self) -> str:
        """Return the row as shown, with its colours reset at its end."""
        note = f" … {self.num_truncated:,} more characters of this line not shown …" if self.num_truncated else ""
        return close_colours(self.text) + note


class Finished(NamedTuple):
    """A row that will not change any more."""

    text: str
    bar: bool = False
    """Whether it is a progress bar, which stays in the live area, instead of an ordinary line."""
    ended: bool = True
    """Whether it ended with a newline."""
    number: int = -1
    """The number of the row if it was shown while unfinished; else -1."""
    order: int = 0
    """The order of its start."""


def split_foreign_text(row: Row) -> str:
    """Remove and return text that other code, such as logging, wrote behind a bar; empty if there is none."""
    meter = METER.match(row.text)
    at = meter.end() if meter else row.joined_at if row.bar else 0
    # All states of a bar have the same length: if it is shorter, the later message was the rest of it.
    line = row.text[at:] if at > 0 and (meter or at >= row.last_length - 1) else ""
    if not COLOUR.sub("", line).strip() or (not meter and line[0].isspace()):
        return ""
    row.text, row.bar, row.joined_at = row.text[:at], True, at
    return line.lstrip(" ")


def append(row: Row, text: str) -> None:
    """Append text to a row, up to `MAX_LINE` characters."""
    if len(row.text) + len(text) <= MAX_LINE:
        row.text += text
    else:
        room = MAX_LINE - len(row.text)
        row.text += text[:room]
        row.num_truncated += len(text) - room


def complete_line(line: str) -> str:
    """Return a line that arrived in one piece, as shown: truncated, with its colours reset at its end."""
    if len(line) <= MAX_LINE:
        return close_colours(line) if "\x1b" in line else line
    row = Row(0, 0, 0.0, 0.0)
    append(row, line)
    return row.shown_text()
