"""The last cells of this rank, kept for a notebook that comes back: what each printed last, and how it ended."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from axon_nb.records.protocol.cells import KEY, CellFacts, CellReport, Cut

__all__ = ["CellLog"]

_KEPT_CELLS = 4
_KEPT_SIZE = 64 << 10
"""Characters of output kept of each cell."""
_FOLLOWED_SIZE = 4 << 20
"""Characters kept while a notebook fetches them; a cell may not print as much."""
_FOLLOWED_S = 5.0
_OVERHEAD = 64
"""What a message counts besides its text: many small ones take memory, too."""
_SHOWN = ("clear_output", "display_data", "execute_result", "stream", "update_display_data")
_DELIMITER = b"<IDS|MSG>"


@dataclass(slots=True)
class _Message:
    number: int
    kind: str
    content: dict[str, Any] | bytes
    """Bytes: as it went out, unparsed."""
    size: int


@dataclass(slots=True)
class _Cut:
    """What is no longer kept."""

    lines: int = 0
    size: int = 0
    displays: int = 0


@dataclass(slots=True)
class _Entry:
    """One cell."""

    facts: CellFacts
    """What the notebook that sent it said."""
    started_ns: int
    messages: deque[_Message] = field(default_factory=deque)
    size: int = 0
    last: int = 0
    """Number of the last message; the first has 1."""
    fetched: int = 0
    followed_until: float = 0.0
    cut: _Cut = field(default_factory=_Cut)
    """Of the whole cell."""
    missed: _Cut = field(default_factory=_Cut)
    """Since who follows the cell has last asked."""
    outcome: dict[str, Any] | None = None
    ended_ns: int = 0

    def add(self, kind: str, content: dict[str, Any] | bytes, size: int) -> None:
        self.last += 1
        message = _Message(self.last, kind, content, size)
        room = _FOLLOWED_SIZE if time.monotonic() < self.followed_until else _KEPT_SIZE
        if isinstance(content, bytes) and size > room // 2:
            self._count(message, content)  # a large picture would push out all the rest
            return
        self.messages.append(message)
        self.size += size
        self.trim()

    def trim(self) -> None:
        followed = time.monotonic() < self.followed_until
        while self.size > _KEPT_SIZE:
            oldest = self.messages[0]
            if followed and oldest.number > self.fetched and self.size <= _FOLLOWED_SIZE:
                return
            room = _KEPT_SIZE - (self.size - oldest.size) - _OVERHEAD
            if not followed and room > 0 and isinstance(oldest.content, dict):
                self._shorten(oldest, room)
                return
            self.messages.popleft()
            self.size -= oldest.size
            self._count(oldest, oldest.content)
            self._drop_rest_of_line(oldest)

    def _drop_rest_of_line(self, dropped: _Message) -> None:
        # One `print` may come as several messages: what is left of a line whose beginning is gone says nothing.
        first = self.messages[0] if self.messages else None
        if first is None or not isinstance(first.content, dict) or not isinstance(dropped.content, dict):
            return
        text, before = first.content["text"], dropped.content
        end = text.find("\n") + 1
        if before.get("name") == first.content.get("name") and before["text"][-1:] != "\n" and 0 < end < len(text):
            self._cut_front(first, end)

    def _cut_front(self, message: _Message, at: int) -> None:
        assert isinstance(message.content, dict)
        text = message.content["text"]
        self._count(message, {"text": text[:at]})
        message.content = {**message.content, "text": text[at:]}
        self.size -= at
        message.size -= at

    def _shorten(self, message: _Message, room: int) -> None:
        assert isinstance(message.content, dict)
        text = message.content["text"]
        at = len(text) - room
        line_end = text.find("\n", at - 1)
        if -1 < line_end < len(text) - 1:
            at = line_end + 1
        self._cut_front(message, at)

    def _count(self, message: _Message, content: dict[str, Any] | bytes) -> None:
        for cut in (self.cut, self.missed) if message.number > self.fetched else (self.cut,):
            if isinstance(content, dict):
                cut.lines += content["text"].count("\n")
                cut.size += len(content["text"])
            elif message.kind != "clear_output":
                cut.displays += 1
                cut.size += len(content)

    def report(self, since: int) -> CellReport:
        """The messages after number `since` (0: all that are kept), what is missing before them, and the outcome."""
        self.fetched, self.followed_until = since, time.monotonic() + _FOLLOWED_S
        cut, self.missed = (self.missed if since else self.cut), _Cut()
        return CellReport(
            run=self.facts.run,
            facts=self.facts if not since else None,
            elapsed_ns=(self.ended_ns or time.monotonic_ns()) - self.started_ns,
            messages=[
                [message.kind, message.content if isinstance(message.content, dict) else json.loads(message.content)]
                for message in self.messages
                if message.number > since
            ],
            last=self.last,
            cut=Cut(cut.lines, cut.size, cut.displays),
            outcome=self.outcome,
        )


class CellLog:
    """Sees every message of the output channel; keeps the last of each cell, at most 64 Ki characters."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._by_message: dict[str, _Entry] = {}

    def begin(self, message_id: str, facts: CellFacts) -> None:
        """A cell begins.

        Args:
            message_id: Of the request, by which output is told to be the cell's.
            facts: What the notebook says about the cell.
        """
        if not facts.run:
            return
        entry = _Entry(facts, time.monotonic_ns())
        with self._lock:
            self._by_message[message_id] = entry
            while len(self._by_message) > _KEPT_CELLS:
                self._by_message.pop(next(iter(self._by_message)))

    def end(self, message_id: str, reply: dict[str, Any]) -> None:
        """The cell has ended with this reply."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # what is under way belongs before the outcome
        names = ("status", "ename", "evalue", "traceback", KEY)
        with self._lock:
            if (entry := self._by_message.get(message_id)) is not None:
                entry.ended_ns = time.monotonic_ns()
                entry.outcome = {name: reply[name] for name in names if name in reply}

    def tap(self, frames: list[Any]) -> None:
        """Take in one message of the output channel, as it goes out; from any thread."""
        if not self._by_message or os.getpid() != self._pid:  # a forked worker's copy is nobody's
            return
        start = frames.index(_DELIMITER)
        _, header, parent, _, content = map(bytes, frames[start + 1 : start + 6])
        entry = self._by_message.get(json.loads(parent).get("msg_id", ""))
        kind = json.loads(header)["msg_type"] if entry is not None else ""
        if entry is None or kind not in _SHOWN:
            return
        if kind == "stream":
            text = json.loads(content)
            size, what = len(text["text"]) + _OVERHEAD, text
        else:
            size, what = len(content), content
        with self._lock:
            entry.add(kind, what, size)

    def report(self, *, run: str | None, since: int, after_ns: int) -> list[CellReport]:
        """What is kept of a cell, or of all cells that have not ended before `after_ns`, oldest first.

        Args:
            run: Which cell; None: all.
            since: Number of the last message that the asker has.
            after_ns: Monotonic time of this host in nanoseconds.
        """
        with self._lock:
            return [
                entry.report(since)
                for entry in self._by_message.values()
                if (entry.facts.run == run if run is not None else not entry.outcome or entry.ended_ns > after_ns)
            ]
