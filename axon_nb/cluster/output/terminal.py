"""The control sequences that text for a terminal holds: which are kept, which are followed, which are left out."""

from __future__ import annotations

import re

__all__ = ["COLOUR", "CONTROL", "INCOMPLETE", "METER", "METER_NAME", "UNUSUAL", "close_colours", "without_control"]

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
