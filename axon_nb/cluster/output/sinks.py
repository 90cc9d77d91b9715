"""Where labelled output goes: the running notebook cell or a recording, and displays that are updated in place.

Labels are ``[rank 2]``, ``[ranks 0,2-3]``. The live area shows progress bars and unfinished lines. The wait notice
says which rank the others wait for; it disappears when the wait ends.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from axon_nb.cluster.output.lines import METER_NAME
from axon_nb.records.environment import SESSION_NAME
from axon_nb.records.ranks import name_ranks

StreamName: TypeAlias = Literal["stdout", "stderr"]
UPDATE_INTERVAL_S = 0.1
_BYTES_PER_S = 200_000
"""Large areas are updated less often."""
_MAX_FINISHED_ROWS = 100
"""An area with this many finished rows is closed, and a new one starts."""
_MAX_AREAS = 100
_STRAGGLER_S = 0.1
"""Ranks that run the same code finish their bars within this time of each other."""
_METER = re.compile(r"(.*%\|.*\| *\S+/\S+ \[)[\d:]+<[\d:]+, *([\d.]+)([a-zA-Z]*/\S.*)$")
"""A bar of tqdm: what comes before its times, its rate, and the rate's unit with what follows."""
_CLOSE = 0.1
"""Bars whose rates differ by less than this share are shown once, as the last of them ended."""
_MAX_ROWS = 200
_MAX_WIDTH = 2000
_NOTICE_INTERVAL_S = 1.0
_MAX_NOTICES = 10
"""Each wait gets a new line below the output so far; after this many, waits reuse the last line."""
_REPEAT_FACTOR = 10.0
"""If lines cannot be removed, a wait is reported again after it has lasted this many times as long."""
_FIRST_NOTICE_S = 3.0
"""A wait has lasted about this long when it is first reported."""


class Sink(Protocol):
    """Shows output; called on the notebook's thread.

    A sink that cannot update what it has shown has an attribute ``in_place = False``. Progress bars are then shown as
    lines when they are finished, and the last update of a display when its rank is.
    """

    def stream(self, name: StreamName, text: str) -> None:
        """Show text of a standard stream."""

    def display(self, data: dict[str, Any], metadata: dict[str, Any], *, display_id: str | None, update: bool) -> None:
        """Show a mime bundle; with `update`, replace the one with the same `display_id`."""

    def clear(self, *, wait: bool) -> None:
        """Clear the cell's output."""


def is_in_place(sink: Sink) -> bool:
    """Return whether the sink can update what it has shown."""
    return bool(getattr(sink, "in_place", True))


class NotebookSink:
    """Publishes to the running cell; prints if there is no notebook."""

    @property
    def in_place(self) -> bool:
        """Whether a kernel shows the output to a page that updates it; scripts and terminals only print."""
        shell = _kernel_shell()
        return shell is not None and not _runs_on_the_server(shell.kernel)

    def stream(self, name: StreamName, text: str) -> None:
        """Write and flush."""
        stream = sys.stdout if name == "stdout" else sys.stderr
        try:
            stream.write(text)
        except UnicodeEncodeError as error:  # a terminal or file that is not UTF-8
            stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        stream.flush()

    def display(self, data: dict[str, Any], metadata: dict[str, Any], *, display_id: str | None, update: bool) -> None:
        """Publish the bundle unchanged."""
        shell = _kernel_shell()
        if shell is not None:
            transient = {"display_id": display_id} if display_id else {}
            shell.display_pub.publish(data=data, metadata=metadata, transient=transient, update=update)
        elif not update and (publisher := _own_publisher()) is not None:
            publisher.publish(data=data, metadata=metadata)
        elif not update and (text := data.get("text/plain")):
            self.stream("stdout", f"{text}\n")

    def clear(self, *, wait: bool) -> None:
        """Clear the cell's output, if there is a notebook."""
        shell = _kernel_shell()
        if shell is not None:
            shell.display_pub.clear_output(wait=wait)


class RecordingSink:
    """Records output in a list.

    Args:
        in_place: Whether to act as a sink that can update what it has shown.
    """

    def __init__(self, *, in_place: bool = True) -> None:
        self.in_place = in_place
        self.records: list[tuple[str, Any]] = []
        """("stdout" or "stderr", text), ("display", (data, display_id, update)), ("clear", wait), in order."""

    def stream(self, name: StreamName, text: str) -> None:
        """Record the text."""
        self.records.append((name, text))

    def display(self, data: dict[str, Any], metadata: dict[str, Any], *, display_id: str | None, update: bool) -> None:
        """Record the bundle."""
        self.records.append(("display", (data, display_id, update)))

    def clear(self, *, wait: bool) -> None:
        """Record the clear."""
        self.records.append(("clear", wait))

    def text(self, name: str = "stdout") -> str:
        """Return all text of one stream."""
        return "".join(payload for kind, payload in self.records if kind == name)


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def _kernel_shell() -> Any:
    shell = _shell()
    return shell if getattr(shell, "kernel", None) is not None else None


def _runs_on_the_server(kernel: Any) -> bool:
    """Whether Jupyter's server itself sent the cell, as with jupyter-server-nbmodel, which ignores updates.

    Ids of messages that Python sends hold its process, and a session's name says that a server started the kernel.
    """
    if not SESSION_NAME.get():
        return False
    sender = str(kernel.get_parent("shell").get("header", {}).get("msg_id", "")).split("_")
    return sender[1:2] == [str(os.getppid())]


def _own_publisher() -> Any:
    """Return what shows displays in a shell without a kernel that has its own, such as ploomber-engine's."""
    publisher = getattr(_shell(), "display_pub", None)
    return None if type(publisher).__module__.startswith(("IPython.", "builtins")) else publisher


def label(ranks: Sequence[int]) -> str:
    """Return a label: ``[rank 2]`` or ``[ranks 0-3]``."""
    return _label(tuple(ranks))


@functools.lru_cache(maxsize=256)
def _label(ranks: tuple[int, ...]) -> str:
    return f"[{name_ranks(ranks)}]"


def labelled(ranks: Sequence[int], text: str) -> str:
    """Return text with its label and a final newline; further lines are indented, so that tables stay aligned."""
    head = label(ranks)
    if "\n" in text:
        text = text.replace("\n", "\n" + " " * (len(head) + 1))
    return f"{head} {text}\n"


def num_bytes(text: str) -> int:
    """Return the size in UTF-8, in bytes."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def valid_text(text: object) -> str:
    """Return text that can be encoded: lone surrogates become question marks."""
    text = text if isinstance(text, str) else str(text)
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


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
        for number, (others, other) in enumerate(self._finished):
            if _are_alike(other, text) and not set(ranks) & set(others):
                self._finished[number] = (sorted([*others, *ranks]), text)
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


def _are_alike(first: str, second: str) -> bool:
    """Whether two lines are equal, or bars that have come as far at about the same rate."""
    if first == second:
        return True
    bars = (_METER.match(first), _METER.match(second))
    if bars[0] is None or bars[1] is None or bars[0].groups()[::2] != bars[1].groups()[::2]:
        return False
    rates = sorted(float(bar[2]) for bar in bars if bar)
    return rates[1] - rates[0] <= _CLOSE * rates[1]


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


class WaitNotice:
    """Shows at most one line at a time; on the notebook's thread.

    Args:
        sink: Where the cell's output goes.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._in_place = is_in_place(sink)
        self._id = ""
        self._num_displays = 0
        self._shown = ""
        self._shown_at = 0.0
        self._first_shown_at = 0.0

    def show(self, sentence: str, now: float) -> None:
        """Show `sentence`, updated at most once per second; if it is empty, hide the line."""
        if not sentence:
            self.hide()
        elif not self._in_place:
            self._print(sentence, now)
        elif sentence != self._shown and (not self._shown or now - self._shown_at >= _NOTICE_INTERVAL_S):
            update = bool(self._shown) or self._num_displays >= _MAX_NOTICES
            if not update:
                self._id = f"axon_nb-waits-{uuid.uuid4().hex}"
                self._num_displays += 1
            self._shown, self._shown_at = sentence, now
            self._publish(sentence, update=update)

    def _print(self, sentence: str, now: float) -> None:
        if not self._shown:
            self._first_shown_at = now
        elif now - self._first_shown_at < _REPEAT_FACTOR * max(_FIRST_NOTICE_S, self._shown_at - self._first_shown_at):
            return
        self._shown, self._shown_at = sentence, now
        self._sink.stream("stdout", f"{sentence}\n")

    def hide(self) -> None:
        """Remove the line if there is one; lines that were printed stay."""
        if self._shown and self._in_place:
            self._publish("", update=True)
        self._shown = ""

    def _publish(self, text: str, *, update: bool) -> None:
        self._sink.display({"text/plain": text}, {}, display_id=self._id, update=update)
