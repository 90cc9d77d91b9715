"""Rows of terminal output, and the control sequences in them: which are kept, interpreted or removed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

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


def close_colours(line: str) -> str:
    """Return the line with its colours reset at its end."""
    if "\x1b" not in line:
        return line
    colours = COLOUR.findall(line)
    return line + "\x1b[0m" if colours and colours[-1] not in _RESETS else line


def strip_control(text: str) -> str:
    """Remove all control sequences except newlines and colours."""
    return _ALL_BUT_COLOUR.sub("", text.replace("\r\n", "\n")) if HAS_CONTROL.search(text) else text


@dataclass(slots=True, eq=False)
class Row:
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
