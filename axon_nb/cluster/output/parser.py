"""Parses what ranks send: queues lines, bars and displays, tracks rows that still change, and saves their text.

Displays are mime bundles that are cheap to compare; display ids are made unique per rank. There is at most one clear
per flush, and no rank loses output that it did not clear itself. Widgets of ranks have no model in the notebook: their
text is shown instead.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from axon_nb.cluster.output.limits import Budget, OmittedOutput
from axon_nb.cluster.output.lines import Finished, LineAssembler, close_colours, strip_control
from axon_nb.cluster.output.merge import Choice, Item, MergeQueue
from axon_nb.cluster.output.sinks import LiveRow, num_bytes, valid_text
from axon_nb.records.protocol.cells import read_omitted

_LABEL_SIZE = 12
"""Approximate size of a label and a newline, in bytes."""
_MAX_LABELLED_TEXT = 32_000
"""A displayed text with more characters gets a label on each line."""
_MIN_QUEUE_BYTES = 64 << 20
"""The total size of the ranks' pending output is at least limited to this."""
_VALUE_HOLD_S = 0.25
"""A cell's value comes last: it waits longer than a line for equal values from ranks that finish a little later."""
FinishedBar = tuple[int, tuple[int, str, int], str]
"""(rank, key of its live row, text) of a bar that was shown and is now finished."""
_WIDGET = "application/vnd.jupyter.widget-view+json"
_WIDGET_NOTE = "(a widget of a rank: its text)"


class Transcript:
    """Saves text in bounded memory: its first and last characters, and the number of characters omitted between them.

    Args:
        limit: Maximum number of characters saved; half of them are the first ones.
    """

    def __init__(self, limit: int = 1 << 20) -> None:
        self._half = max(1, limit // 2)
        self._head: list[str] = []
        self._head_size = 0
        self._tail: deque[str] = deque()
        self._tail_size = 0
        self._num_omitted = 0

    def add(self, text: str) -> None:
        """Append text."""
        if (room := self._half - self._head_size) > 0:
            self._head.append(text[:room])
            self._head_size += len(self._head[-1])
            text = text[room:]
        if not text:
            return
        self._tail.append(text[-self._half :])
        self._num_omitted += len(text) - len(self._tail[-1])
        self._tail_size += len(self._tail[-1])
        while self._tail_size - len(self._tail[0]) >= self._half:
            removed = len(self._tail.popleft())
            self._tail_size -= removed
            self._num_omitted += removed

    def text(self) -> str:
        """Return the saved text, with a note if characters were omitted."""
        note = f"\n… {self._num_omitted:,} characters omitted …\n" if self._num_omitted else ""
        return "".join([*self._head, note, *self._tail])


class OutputParser:
    """Parses all streams of a cell. Not thread-safe: its owner holds a lock.

    Args:
        ranks: The ranks that run the cell.
        budget: How much the cell may still show.
        quiet: Whether to save the text only.
        in_place: Whether shown output can be updated; if not, bars are shown as lines when they are finished.
    """

    def __init__(self, ranks: Sequence[int], budget: Budget, *, quiet: bool, in_place: bool) -> None:
        self.queue = MergeQueue(ranks)
        self.omitted = OmittedOutput()
        self.finished_bars: list[FinishedBar] = []
        """Bars that were shown and have finished since the last flush."""
        self._budget = budget
        self.touched_live_rows = False
        """Whether the last message changed rows that are shown while they may change."""
        self._quiet = quiet
        self._in_place = in_place
        self._streams: dict[int, dict[str, LineAssembler]] = {rank: {} for rank in ranks}
        self._transcripts = {rank: Transcript() for rank in ranks}
        self._accepted = dict.fromkeys(ranks, 0)
        self._full: set[int] = set()
        self._updates: dict[str, Item] = {}
        self._last: dict[int, dict[str | None, Bundle]] = {rank: {} for rank in ranks}
        """The last update of each display, by rank, if shown output cannot be updated."""
        self._max_queue_bytes = max(_MIN_QUEUE_BYTES // max(1, len(ranks)), 2 * budget.limit)
        self._order = 0

    def feed(self, rank: int, msg_type: str, content: dict[str, Any], now: float) -> bool:
        """Parse one message; return whether it changes what is shown."""
        if rank not in self._streams:
            return False
        self._order += 1
        was_live = self._is_live(rank)
        if msg_type == "stream":
            self._feed_text(rank, content, now)
        elif msg_type in ("execute_result", "display_data", "update_display_data"):
            bundle = read_bundle(rank, msg_type, content)
            if bundle is None or self._quiet:
                return False
            self._feed_display(rank, bundle, now + (_VALUE_HOLD_S if msg_type == "execute_result" else 0.0))
        elif msg_type == "clear_output" and self._in_place:
            self._feed_clear(rank, bool(content.get("wait")), now)
        else:
            return False
        self.touched_live_rows = self._in_place and (was_live or self._is_live(rank))
        return not self._quiet

    def _feed_text(self, rank: int, content: dict[str, Any], now: float) -> None:
        text = valid_text(content.get("text", ""))
        name = "stderr" if content.get("name") == "stderr" else "stdout"
        stream = self._streams[rank].get(name)
        if stream is None:
            stream = self._streams[rank][name] = LineAssembler()
        if (omitted := read_omitted(content)) is None:
            rows = stream.feed(text, now, self._order)
            self._order = stream.order
            self._put_rows(rank, name, rows, now)
            return
        # The rank reached its own limit: this is its last output, and what came before it is lost.
        self._put_rows(rank, name, stream.settle(now, final=True), now)
        self._transcripts[rank].add(
            f"… {omitted.lines:,} lines ({omitted.size / 1e6:.1f} MB) omitted by the rank …\n{text}"
        )
        if not self._quiet:
            self._budget.exceeded = True
            self.omitted.count(rank, lines=omitted.lines, size=omitted.size)
            last = LineAssembler()
            for row in [*last.feed(text, now, self._order), *last.settle(now, final=True)]:
                self.omitted.add(rank, name, row.text, row.order)
            self._order = last.order

    def _put_rows(self, rank: int, name: str, rows: Sequence[Finished], now: float, *, bars: bool = True) -> None:
        if rows:
            self._transcripts[rank].add("".join(f"{row.text}\n" if row.ended else row.text for row in rows))
        if self._quiet:
            return
        for row in rows:
            if row.bar and not bars:
                continue
            if not (row.bar and self._in_place):
                self._put_line(rank, name, row, now)
            elif row.number < 0:
                size = num_bytes(row.text) + _LABEL_SIZE
                self.queue.put(rank, Item(("bar", row.text), "bar", row.text, size, now, row.order))
            elif self._budget.spend_bar(len(row.text)):
                self.finished_bars.append((rank, (rank, name, row.number), row.text))
            else:
                self.omitted.count(rank, lines=1, size=len(row.text))

    def _put_line(self, rank: int, name: str, row: Finished, now: float) -> None:
        line = row.text
        size = num_bytes(line) + _LABEL_SIZE
        accepted = self._accepted[rank] + size
        if (
            self._budget.over
            or rank in self._full
            or accepted > self._budget.limit
            or self.queue.memory(rank) > self._max_queue_bytes
        ):
            # After the first omitted line nothing is shown until the note, so that the output has one gap, not many.
            self._full.add(rank)
            self._budget.exceeded = self._budget.exceeded or accepted > self._budget.limit
            self.omitted.add(rank, name, line, row.order)
            return
        self._accepted[rank] = accepted
        self.queue.put(rank, Item((name, line), name, line, size, now, row.order))

    def _feed_display(self, rank: int, bundle: Bundle, now: float) -> None:
        if not self._in_place and bundle.update:
            self._last[rank][bundle.display_id] = bundle
            return
        if not self._in_place:
            bundle = bundle._replace(display_id=None)
        if (text := bundle.text) is not None:
            for line in [text] if len(text) <= _MAX_LABELLED_TEXT else text.split("\n"):
                self._order += 1
                self._put_line(rank, "stdout", Finished(line, order=self._order), now)
            return
        size = bundle.size
        waiting = self._updates.get(bundle.display_id or "") if bundle.update else None
        if waiting is not None:
            # Only the last of several pending updates matters.
            waiting.payload = bundle
            self.queue.resize(rank, waiting, size)
            return
        if self.queue.memory(rank) + size > self._max_queue_bytes:
            self.omitted.count(rank, displays=1, size=size)
            return
        item = Item(bundle.key(), "display", bundle, size, now, self._order)
        if bundle.update and bundle.display_id:
            self._updates[bundle.display_id] = item
        self.queue.put(rank, item)

    def _feed_clear(self, rank: int, wait: bool, now: float) -> None:
        for name, stream in self._streams[rank].items():
            self._put_rows(rank, name, stream.settle(now, final=True), now, bars=False)
        if self._quiet:
            return
        self.omitted.forget(rank)
        self._full.discard(rank)
        self._budget.over = False
        self._accepted[rank] = 0
        last = self.queue.last(rank)
        if last is None or last.key != ("clear", wait):
            self.queue.put(rank, Item(("clear", wait), "clear", wait, 0, now, self._order))

    def forget_update(self, item: Item) -> None:
        """Forget an update that has left the queue: later updates of the same display are queued separately."""
        if item.kind == "display" and item.payload.update:
            self._updates.pop(item.payload.display_id, None)

    def omit(self, rank: int, item: Item) -> None:
        """Count an item that is not shown."""
        if item.kind == "display":
            self.omitted.count(rank, displays=1, size=item.size)
        elif item.kind == "bar":
            self.omitted.count(rank, lines=1, size=item.size)
        else:
            self._full.add(rank)
            self.omitted.add(rank, item.kind, item.payload, item.order)

    def settle(self, now: float, *, final: bool = False, ranks: Sequence[int] | None = None) -> None:
        """Queue the rows that will not change any more; with `final` all rows."""
        for rank in self._streams if ranks is None else ranks:
            for name, stream in self._streams[rank].items():
                self._put_rows(rank, name, stream.settle(now, final=final), now)
            while final and self._last[rank]:
                bundle = self._last[rank].pop(next(iter(self._last[rank])))
                self._feed_display(rank, bundle._replace(update=False), now)

    def live_rows(self, now: float) -> list[LiveRow]:
        """Return the rows to show although they may change, by rank; empty if shown output cannot be updated."""
        rows = [
            LiveRow(
                rank, (rank, name, row.number), row.shown_text(), row.order, row.started_at, *stream.has_left(row, now)
            )
            for rank, streams in self._streams.items()
            for name, stream in streams.items()
            for row in stream.live_rows(now)
        ]
        return rows if self._in_place else []

    def next_change(self) -> float | None:
        """Return when the shown output next changes without a message, in the clock's seconds; None: never."""
        times = [stream.next_change() for streams in self._streams.values() for stream in streams.values()]
        return min((time for time in times if time is not None), default=None)

    def _is_live(self, rank: int) -> bool:
        return any(stream.is_live for stream in self._streams[rank].values())

    def text(self, rank: int) -> str:
        """Return what a rank has printed so far."""
        unfinished = [stream.unfinished for stream in self._streams[rank].values()]
        return self._transcripts[rank].text() + "\n".join(filter(None, unfinished))


class Bundle(NamedTuple):
    """One display, or an update of one."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str | None
    """The target of later updates; unique to the rank."""
    update: bool

    @property
    def text(self) -> str | None:
        """The text of a display that consists of text only and cannot be updated; else None."""
        if self.update or self.display_id or set(self.data) != {"text/plain"}:
            return None
        text = self.data["text/plain"]
        return close_colours(strip_control(valid_text("".join(text) if isinstance(text, list) else text)))

    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for displays that look the same; displays with an id are never equal."""
        if self.display_id or self.update:
            return ("display", self.display_id, self.update)
        values = ((mime, value if isinstance(value, str) else _json(value)) for mime, value in self.data.items())
        return ("display", _json(self.metadata), *sorted(values))

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        return sum(len(value if isinstance(value, str) else _json(value)) for value in self.data.values())


def read_bundle(rank: int, msg_type: str, content: dict[str, Any]) -> Bundle | None:
    """Read the display in a rank's message; None if there is none."""
    data = content.get("data")
    if not isinstance(data, dict) or (not data and msg_type != "update_display_data"):
        return None
    if _WIDGET in data:
        data = {mime: value for mime, value in data.items() if mime not in (_WIDGET, "text/html")}
        data["text/plain"] = f"{data.get('text/plain', 'a widget')} {_WIDGET_NOTE}"
    own_id = (content.get("transient") or {}).get("display_id")
    display_id = f"{own_id}-rank{rank}" if own_id else None
    update = msg_type == "update_display_data"
    return None if update and not display_id else Bundle(data, content.get("metadata") or {}, display_id, update)


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


class PendingClears:
    """Tracks the ranks whose clear waits for their next output (``clear_output(wait=True)``)."""

    def __init__(self) -> None:
        self._waiting: set[int] = set()

    def apply(self, batch: Sequence[Choice]) -> tuple[set[int], list[Choice]]:
        """Apply the clears in a batch.

        Args:
            batch: Items in order, including clears.

        Returns:
            The ranks whose clear takes effect now, and the items left to show.
        """
        if not self._waiting and not any(item.kind == "clear" for _, item, _ in batch):
            return set(), list(batch)
        cleared, deferred, seen = set[int](), set[int](), set[int]()
        remaining = []
        for ranks, item, order in reversed(batch):
            if item.kind == "clear":
                now = {rank for rank in ranks if not item.payload or rank in seen}
                cleared |= now
                deferred |= set(ranks) - now - seen
                continue
            seen.update(ranks)
            if not_cleared := [rank for rank in ranks if rank not in cleared]:
                remaining.append(Choice(not_cleared, item, order))
        cleared |= self._waiting & seen
        self._waiting = (self._waiting - cleared) | deferred
        return cleared, remaining[::-1]
