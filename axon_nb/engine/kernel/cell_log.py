"""Saves the last cells of this rank, with their latest output and outcome, for a notebook that reconnects."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from json import loads  # by name: a cell may replace functions of the module
from typing import Any

from axon_nb.records.protocol.cells import CellFacts, CellReport, Omitted, read_outcome

_MAX_CELLS = 4
_MAX_SIZE = 64 << 10
"""Characters of output saved per cell."""
_MAX_REPLAY_SIZE = 4 << 20
"""Characters saved while a notebook replays them; more than a cell may print."""
_REPLAY_TIMEOUT_S = 5.0
_MESSAGE_OVERHEAD = 64
"""Size counted per message besides its text: many small messages take memory, too."""
_OUTPUT_TYPES = ("clear_output", "display_data", "execute_result", "stream", "update_display_data")
_DELIMITER = b"<IDS|MSG>"


@dataclass(slots=True)
class _Message:
    number: int
    kind: str
    content: dict[str, Any] | bytes
    """Bytes: as sent, unparsed."""
    size: int


@dataclass(slots=True)
class _Omitted:
    """How much output was discarded."""

    lines: int = 0
    size: int = 0
    displays: int = 0


@dataclass(slots=True)
class _CellRecord:
    """One cell."""

    facts: CellFacts
    """The request's metadata from the notebook."""
    started_ns: int
    messages: deque[_Message] = field(default_factory=deque)
    size: int = 0
    last: int = 0
    """Number of the last message; the first is 1."""
    fetched: int = 0
    replay_until: float = 0.0
    omitted: _Omitted = field(default_factory=_Omitted)
    """Over the whole cell."""
    newly_omitted: _Omitted = field(default_factory=_Omitted)
    """Since the last request of a replay."""
    sent: int = 0
    """How many messages were sent on the output channel, those included that are not saved."""
    reply: dict[str, Any] | None = None
    finished_ns: int = 0

    def add(self, kind: str, content: dict[str, Any] | bytes, size: int) -> None:
        self.last += 1
        message = _Message(self.last, kind, content, size)
        room = _MAX_REPLAY_SIZE if time.monotonic() < self.replay_until else _MAX_SIZE
        if isinstance(content, bytes) and size > room // 2:
            self._count_omitted(message, content)  # a large picture would displace everything else
            return
        self.messages.append(message)
        self.size += size
        self.trim()

    def trim(self) -> None:
        is_replaying = time.monotonic() < self.replay_until
        while self.size > _MAX_SIZE:
            oldest = self.messages[0]
            if is_replaying and oldest.number > self.fetched and self.size <= _MAX_REPLAY_SIZE:
                return
            room = _MAX_SIZE - (self.size - oldest.size) - _MESSAGE_OVERHEAD
            if not is_replaying and room > 0 and isinstance(oldest.content, dict):
                self._shorten(oldest, room)
                return
            self.messages.popleft()
            self.size -= oldest.size
            self._count_omitted(oldest, oldest.content)
            self._drop_rest_of_line(oldest)

    def _drop_rest_of_line(self, dropped: _Message) -> None:
        # One `print` may arrive as several messages: the rest of a line whose start was discarded is meaningless.
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
        self._count_omitted(message, {"text": text[:at]})
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

    def _count_omitted(self, message: _Message, content: dict[str, Any] | bytes) -> None:
        for omitted in (self.omitted, self.newly_omitted) if message.number > self.fetched else (self.omitted,):
            if isinstance(content, dict):
                omitted.lines += content["text"].count("\n")
                omitted.size += len(content["text"])
            elif message.kind != "clear_output":
                omitted.displays += 1
                omitted.size += len(content)

    def report(self, since: int) -> CellReport:
        """Report messages after number `since` (0: all saved ones), the amount omitted before them, and the outcome."""
        self.fetched, self.replay_until = since, time.monotonic() + _REPLAY_TIMEOUT_S
        omitted, self.newly_omitted = (self.newly_omitted if since else self.omitted), _Omitted()
        return CellReport(
            run=self.facts.run,
            facts=self.facts if not since else None,
            elapsed_ns=(self.finished_ns or time.monotonic_ns()) - self.started_ns,
            messages=[
                [message.kind, message.content if isinstance(message.content, dict) else loads(message.content)]
                for message in self.messages
                if message.number > since
            ],
            last=self.last,
            omitted=Omitted(omitted.lines, omitted.size, omitted.displays),
            outcome=None if self.reply is None else read_outcome(self.reply),
        )


class CellLog:
    """Sees every message of the output channel; saves the latest output of each cell, at most 64 Ki characters."""

    def __init__(self) -> None:
        self.sees_all = False
        """Whether `tap` is called with each message, which a later ipykernel may not allow."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._records: dict[str, _CellRecord] = {}

    def begin(self, message_id: str, facts: CellFacts) -> None:
        """Start recording a cell.

        Args:
            message_id: Id of the request; output messages refer to it.
            facts: The notebook's metadata about the cell.
        """
        if not facts.run:
            return
        record = _CellRecord(facts, time.monotonic_ns())
        with self._lock:
            self._records[message_id] = record
            while len(self._records) > _MAX_CELLS:
                self._records.pop(next(iter(self._records)))

    def outputs(self, message_id: str) -> int | None:
        """Return how many messages of the cell were sent on the output channel; None if it is not known."""
        record = self._records.get(message_id)
        return record.sent if record is not None and self.sees_all else None

    def end(self, message_id: str, reply: dict[str, Any]) -> None:
        """Record the cell's reply; its output has been sent."""
        with self._lock:
            if (record := self._records.get(message_id)) is not None:
                record.finished_ns = time.monotonic_ns()
                record.reply = reply

    def tap(self, frames: list[Any]) -> None:
        """Record one outgoing message of the output channel; thread-safe."""
        if not self._records or os.getpid() != self._pid:  # nobody reads the copy in a forked worker
            return
        start = frames.index(_DELIMITER)
        _, header, parent, _, content = map(bytes, frames[start + 1 : start + 6])
        record = self._records.get(loads(parent).get("msg_id", ""))
        kind = loads(header)["msg_type"] if record is not None else "status"
        if record is None or kind == "status":
            return
        with self._lock:
            record.sent += 1
        if kind not in _OUTPUT_TYPES:
            return
        if kind == "stream":
            text = loads(content)
            size, what = len(text["text"]) + _MESSAGE_OVERHEAD, text
        else:
            size, what = len(content), content
        with self._lock:
            record.add(kind, what, size)

    def report(self, *, run: str | None, since: int, after_ns: int) -> list[CellReport]:
        """Report one cell, or all cells that had not finished before `after_ns`, oldest first.

        Args:
            run: The cell's run id; None for all cells.
            since: Number of the last message that the caller already has.
            after_ns: Monotonic time of this host in nanoseconds.
        """
        with self._lock:
            return [
                record.report(since)
                for record in self._records.values()
                if (
                    record.facts.run == run
                    if run is not None
                    else record.reply is None or record.finished_ns > after_ns
                )
            ]
