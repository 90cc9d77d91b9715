"""Rows of a screen: those that still change, and those that are finished.

The control sequences that text for a terminal holds: which are kept, which are followed, which are left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "COLOUR",
    "CONTROL",
    "INCOMPLETE",
    "MAX_LINE",
    "METER",
    "METER_NAME",
    "UNUSUAL",
    "Finished",
    "Row",
    "append",
    "close_colours",
    "take_intruder",
    "whole_line",
    "without_control",
]

_CSI = r"\x1b\[[0-9;:<=>?]*[ -/]*[@-~]"
_OSC = r"\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)"
_OTHER = r"\x1b[()*+][0-9A-Za-z]|\x1b[0-9<-Zc-z|}~]"

CONTROL = re.compile(rf"(\n|\r|\x08+|{_CSI}|{_OSC}|{_OTHER})")
"""Splits text into plain pieces, at even places, and the sequences between them."""

UNUSUAL = re.compile(r"[\r\x08]|\x1b(?!\[[0-9;:]*m)")
"""Matches when text holds more than lines and colours."""

INCOMPLETE = re.compile(r"\x1b(?:\[[0-9;:<=>?]{0,32}|\][^\x07\x1b\n]{0,2048}\x1b?|[()*+])?\Z")
"""Matches the beginning of a sequence at the end of text: the rest comes with the next piece."""

METER = re.compile(r".*\[(?:[0-9]+:)?[0-9]+:[0-9]{2}[<,][^\[\]]*\](?:\x1b\[[0-9;:]*m)*")
"""Matches a row of tqdm up to its end: ``… 3/10 [00:01<00:02, 2.9it/s]``."""

METER_NAME = re.compile(r"\s*(.*?)\s*[0-9]+%\|.*[^0-9][0-9.]+\S*?/(\S+) \[")
"""Finds what a row of tqdm counts, and up to where: the same in all its states."""

COLOUR = re.compile(r"\x1b\[([0-9;:]*)m")
_ALL_BUT_COLOUR = re.compile(rf"(?!{COLOUR.pattern})(?:[\r\x08]|{_CSI}|{_OSC}|{_OTHER}|\x1b)")
_RESETS = frozenset({"", "0", "00"})


def close_colours(line: str) -> str:
    """A line whose colours end with it."""
    if "\x1b" not in line:
        return line
    colours = COLOUR.findall(line)
    return line + "\x1b[0m" if colours and colours[-1] not in _RESETS else line


def without_control(text: str) -> str:
    """Text with lines and colours only."""
    return _ALL_BUT_COLOUR.sub("", text.replace("\r\n", "\n")) if UNUSUAL.search(text) else text


MAX_LINE = 65536
"""Characters of one line; more are cut, and counted in a note at its end."""


@dataclass(slots=True, eq=False)
class Row:
    """One row of the screen that is not finished yet."""

    number: int
    """Tells it from the other rows of its stream."""
    order: int
    """Higher for what began later, in whatever stream."""
    began_at: float
    changed_at: float
    text: str = ""
    num_cut: int = 0
    """Characters over the limit."""
    bar: bool = False
    """Whether it has been written over: a progress bar."""
    erased: bool = False
    """Whether it was erased by a control sequence and then written once: it may be an ordinary line."""
    fresh: bool = False
    """Whether the next text replaces it."""
    entered: bool = False
    """Whether the cursor has just come down to its beginning: text, but for a bar's, is a new line."""
    stepped_over: bool = False
    """Whether the cursor went up over it: when it is empty it is no line, but room between bars."""
    returned: bool = False
    """Whether a return has begun it, as bars do."""
    written_by: int = 0
    """Number of the message that wrote its text."""
    joined_at: int = 0
    """Where in a bar's text a later message went on without a return; 0: nowhere, -1: not to be asked."""
    last_length: int = 0
    """Characters of the text that was written over."""
    shown: bool = False
    """Whether it was shown while unfinished."""

    def shown_text(self) -> str:
        """The row as it is to be seen, its colours closed."""
        note = f" … {self.num_cut:,} more characters of this line not shown …" if self.num_cut else ""
        return close_colours(self.text) + note


class Finished(NamedTuple):
    """A row that will not change any more."""

    text: str
    bar: bool = False
    """Whether it is a progress bar, which stays in the live area, rather than an ordinary line."""
    ended: bool = True
    """Whether a newline ended it."""
    number: int = -1
    """The row's, when it was shown while unfinished; else -1."""
    order: int = 0
    """Of its beginning."""


def take_intruder(row: Row) -> str:
    """Takes off what something else than the bar, such as logging, has written behind it; empty when nothing has."""
    meter = METER.match(row.text)
    at = meter.end() if meter else row.joined_at if row.bar else 0
    # A bar keeps its length from one state to the next: when it is shorter, the later message was the rest of it.
    line = row.text[at:] if at > 0 and (meter or at >= row.last_length - 1) else ""
    if not COLOUR.sub("", line).strip() or (not meter and line[0].isspace()):
        return ""
    row.text, row.bar, row.joined_at = row.text[:at], True, at
    return line.lstrip(" ")


def append(row: Row, text: str) -> None:
    """Adds text to a row, as far as it fits."""
    if len(row.text) + len(text) <= MAX_LINE:
        row.text += text
    else:
        room = MAX_LINE - len(row.text)
        row.text += text[:room]
        row.num_cut += len(text) - room


def whole_line(line: str) -> str:
    """A line that came in one piece, as it is to be seen."""
    if len(line) <= MAX_LINE:
        return close_colours(line) if "\x1b" in line else line
    row = Row(0, 0, 0.0, 0.0)
    append(row, line)
    return row.shown_text()
