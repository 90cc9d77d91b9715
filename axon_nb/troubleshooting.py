"""The entries of the troubleshooting page: their names, the messages that they explain, and their text.

The page is the registry. An entry's heading is the message, with `…` for what varies; the label above it is its name,
and its anchor on the site.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PAGE = "docs/help/troubleshooting.md"
"""The page's file in the repository; a wheel has it next to this module."""
MORE = "More: "
"""How the line begins that points to an entry."""
_ENTRY = re.compile(
    r"^\((?P<name>[a-z-]+)\)=\n### (?P<ticks>`+) ?(?P<message>.+?) ?(?P=ticks)\n\n(?P<text>.+?)"
    r"(?=\n+\([a-z-]+\)=\n|\n+## |\Z)",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_MARKUP = re.compile(rf"^(?:```\w*|{MORE}.*)\n", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """What the page says about a message."""

    name: str
    message: str
    """The message, with `…` for what varies."""
    text: str
    """How it looks, its cause and what to do, in Markdown."""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Finds the message in a text."""
        parts = map(re.escape, self.message.strip("… ").split("…"))
        return re.compile(r"[^\n]*?".join(parts).replace(r"was\ killed", r"(?:was|were)\ killed"))

    def __str__(self) -> str:
        text = _MARKUP.sub("", _LINK.sub(r"\1", self.text))
        return f"{text}\n\nOn the site: help/troubleshooting.html#{self.name}"


def entries() -> list[Entry]:
    """Return all entries in the order of the page; none if the page is not installed: an error is shown without it."""
    package = Path(__file__).parent
    for path in (package / Path(PAGE).name, package.parent / PAGE):
        try:
            text = path.read_text(encoding="utf-8")
        except OSError:
            continue
        return [Entry(found["name"], found["message"], found["text"].strip()) for found in _ENTRY.finditer(text)]
    return []


def name_of(text: str) -> str:
    """Return the name of the entry whose message is in a text; the earliest counts; empty if there is none."""
    found = [(match.start(), entry.name) for entry in entries() if (match := entry.pattern.search(text))]
    return min(found)[1] if found else ""


def more(text: str, command: str = "%distributed help") -> list[str]:
    """Return the line that points from a message to its entry; no line if it has none.

    Args:
        text: The message.
        command: What shows an entry there.
    """
    name = name_of(text)
    return [f"{MORE}`{command} {name}`"] if name else []


def explain(words: Sequence[str]) -> str:
    """Return the entry of a name or of a message, or the list of those that contain the words.

    Args:
        words: What was typed after ``help``; empty: list all.
    """
    known, typed = entries(), " ".join(words)
    exact = [entry for entry in known if entry.name in (typed, name_of(typed))]
    found = exact or [entry for entry in known if typed.lower() in f"{entry.name} {entry}".lower()]
    if [entry.name for entry in found] == ["wrong-numbers"]:
        from axon_nb.wrong_numbers import listing  # no start needs it

        return f"{found[0]}\n\n{listing()}"
    if len(found) == 1:
        return str(found[0])
    width = max((len(entry.name) for entry in known), default=0)
    head = "" if found or not typed else f"No entry contains {typed!r}. These are all:\n"
    return head + "\n".join(f"{entry.name:<{width}}  {entry.message.strip()}" for entry in found or known)
