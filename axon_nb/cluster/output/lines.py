"""Text that comes in pieces, as finished lines and rows that still change (progress bars)."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Finished", "LineAssembler", "Row"]

_CONTROL = re.compile(r"(\r\n|\r|\n|\x1b\[[0-9]*A|\x1b\[[0-9]*K)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MAX_LINE = 65536
_BAR_SETTLES_S = 0.15
"""A bar that is left by a newline may be come back to: nested bars move down and up again."""


@dataclass(slots=True)
class Row:
    """One row on the screen that is not finished yet."""

    text: str = ""
    bar: bool = False
    """Whether a carriage return has replaced its text."""
    changed_at: float = 0.0
    live: bool = False
    """Whether it was shown while unfinished; it then stays where it was shown."""
    fresh: bool = False
    """Whether the next text replaces the row."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A row that will not change any more."""

    text: str
    live: bool
    """Whether it was shown in the live area, and stays there."""


class LineAssembler:
    """One stream of one rank: follows the few control sequences that progress bars use."""

    def __init__(self) -> None:
        self._rows: list[Row] = [Row()]
        self._cursor = 0

    def feed(self, text: str, now: float) -> list[Finished]:
        """Take in text; returns the rows that it finishes."""
        if "\r" not in text and "\x1b[" not in text and len(self._rows) == 1 and not self._rows[0].fresh:
            return self._feed_plain(text, now)
        for piece in _CONTROL.split(text):
            if piece:
                self._apply(piece, now)
        return self.settle(now)

    def _feed_plain(self, text: str, now: float) -> list[Finished]:
        row = self._rows[0]
        *lines, rest = text.split("\n")
        if lines and not (row.bar or row.live):
            lines[0] = row.text + lines[0]
            self._rows[0] = row = Row(changed_at=now)
            row.text = _cut(rest)
            return [Finished(_close(_cut(line)), live=False) for line in lines]
        for index, line in enumerate([*lines, rest]):
            if index:
                self._apply("\n", now)
            if line:
                self._apply(line, now)
        return self.settle(now)

    def _apply(self, piece: str, now: float) -> None:
        row = self._rows[self._cursor]
        if piece in ("\n", "\r\n"):
            row.changed_at = now
            self._cursor += 1
            if self._cursor == len(self._rows):
                self._rows.append(Row(changed_at=now))
        elif piece == "\r":
            if not row.text.strip():
                # A bar that was wiped, as tqdm.write does before it prints a line.
                row.text, row.bar, row.live = "", False, False
            row.fresh = True
        elif piece.endswith("A") and piece.startswith("\x1b["):
            self._cursor = max(0, self._cursor - int(piece[2:-1] or 1))
        elif piece.endswith("K") and piece.startswith("\x1b["):
            row.text = ""
        else:
            if row.fresh:
                row.bar = row.bar or bool(row.text)
                row.text, row.fresh = "", False
            row.text, row.changed_at = _cut(row.text + piece), now

    def settle(self, now: float, *, final: bool = False) -> list[Finished]:
        """The rows at the top that will not change any more; with `final` all of them."""
        finished = []
        while self._cursor > 0 or (final and self._rows):
            row = self._rows[0]
            kept = row.bar or row.live
            if kept and not final and now - row.changed_at < _BAR_SETTLES_S:
                break
            unended = self._cursor <= 0
            if row.text.strip() or not (kept or unended):
                finished.append(Finished(_close(row.text), kept))
            self._rows.pop(0)
            self._cursor -= 1
        if not self._rows:
            self._rows, self._cursor = [Row(changed_at=now)], 0
        return finished

    def live_rows(self, now: float, after_s: float) -> list[str]:
        """The rows to show now although they may change: bars, and plain ones unfinished for `after_s` seconds."""
        shown = []
        for row in self._rows:
            if row.text.strip() and (row.bar or row.live or now - row.changed_at >= after_s):
                row.live = True
                shown.append(_close(row.text))
        return shown

    @property
    def pending(self) -> bool:
        """Whether something is unfinished."""
        return any(row.text.strip() for row in self._rows) or len(self._rows) > 1


def _cut(line: str) -> str:
    if len(line) <= _MAX_LINE:
        return line
    return f"{line[: _MAX_LINE - 100]} … (line cut: longer than {_MAX_LINE:,} characters)"


def _close(line: str) -> str:
    """A line whose colours end with it."""
    line = line.rstrip("\r")
    colours = _COLOUR.findall(line)
    return line + "\x1b[0m" if colours and colours[-1] not in ("\x1b[0m", "\x1b[m", "\x1b[00m") else line
