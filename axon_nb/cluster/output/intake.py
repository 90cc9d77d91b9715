"""What ranks send, taken apart: lines, bars and displays for the queue, rows that still change, text to keep.

The text that one rank printed, in bounded memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from axon_nb.cluster.output.displays import Bundle, read_bundle
from axon_nb.cluster.output.limits import Budget, Dropped
from axon_nb.cluster.output.lines import LineAssembler
from axon_nb.cluster.output.live_area import LiveRow
from axon_nb.cluster.output.merge import Item, MergeQueue
from axon_nb.cluster.output.rows import Finished
from axon_nb.cluster.output.sinks import num_bytes, valid_text

__all__ = ["FixedBar", "Intake", "Transcript"]


class Transcript:
    """Keeps the first and the last characters, and says in between how many are left out.

    Args:
        limit: Characters kept, half of them from the beginning.
    """

    def __init__(self, limit: int = 1 << 20) -> None:
        self._half = max(1, limit // 2)
        self._head: list[str] = []
        self._head_size = 0
        self._tail: deque[str] = deque()
        self._tail_size = 0
        self._num_left_out = 0

    def add(self, text: str) -> None:
        """Add text at the end."""
        if (room := self._half - self._head_size) > 0:
            self._head.append(text[:room])
            self._head_size += len(self._head[-1])
            text = text[room:]
        if not text:
            return
        self._tail.append(text[-self._half :])
        self._num_left_out += len(text) - len(self._tail[-1])
        self._tail_size += len(self._tail[-1])
        while self._tail_size - len(self._tail[0]) >= self._half:
            gone = len(self._tail.popleft())
            self._tail_size -= gone
            self._num_left_out += gone

    def text(self) -> str:
        """All that is kept."""
        note = f"\n… {self._num_left_out:,} characters left out …\n" if self._num_left_out else ""
        return "".join([*self._head, note, *self._tail])


_LABEL_SIZE = 12
"""About the bytes of a label and a newline."""
_LABELLED_AT_ONCE = 32_000
"""Characters of a displayed text that still stands under one label."""
_MEMORY = 64 << 20
"""Bytes that all ranks together may have waiting, at least."""
_VALUE_WAITS_S = 0.25
"""The value of a cell comes last: it may wait longer than a line for that of ranks which end a little later."""

FixedBar = tuple[int, tuple[int, str, int], str]
"""(rank, key of its live row, text) of a bar that was shown and is finished."""


class Intake:
    """The state of all streams of a cell. Its owner guards it with a lock.

    Args:
        ranks: The ranks that run the cell.
        budget: What the cell may still show.
        quiet: Only keep the text.
        in_place: Whether what is shown can be changed; else bars are lines, shown when they are finished.
    """

    def __init__(self, ranks: Sequence[int], budget: Budget, *, quiet: bool, in_place: bool) -> None:
        self.queue = MergeQueue(ranks)
        self.dropped = Dropped()
        self.fixed: list[FixedBar] = []
        """Bars that were shown and have been finished since."""
        self._budget = budget
        self.touches_live = False
        """Whether the message before changed rows that are shown while they may change."""
        self._quiet = quiet
        self._in_place = in_place
        self._streams: dict[int, dict[str, LineAssembler]] = {rank: {} for rank in ranks}
        self._transcripts = {rank: Transcript() for rank in ranks}
        self._accepted = dict.fromkeys(ranks, 0)
        self._full: set[int] = set()
        self._updates: dict[str, Item] = {}
        self._memory = max(_MEMORY // max(1, len(ranks)), 2 * budget.limit)
        self._order = 0

    def take(self, rank: int, msg_type: str, content: dict[str, Any], now: float) -> bool:
        """Take in one message; False when it is nothing that is shown."""
        if rank not in self._streams:
            return False
        self._order += 1
        was_live = self._is_live(rank)
        if msg_type == "stream":
            self._take_text(rank, content, now)
        elif msg_type in ("execute_result", "display_data", "update_display_data"):
            bundle = read_bundle(rank, msg_type, content)
            if bundle is None or self._quiet:
                return False
            self._take_display(rank, bundle, now + (_VALUE_WAITS_S if msg_type == "execute_result" else 0.0))
        elif msg_type == "clear_output" and self._in_place:
            self._take_clear(rank, bool(content.get("wait")), now)
        else:
            return False
        self.touches_live = self._in_place and (was_live or self._is_live(rank))
        return not self._quiet

    def _take_text(self, rank: int, content: dict[str, Any], now: float) -> None:
        text = valid_text(content.get("text", ""))
        name = "stderr" if content.get("name") == "stderr" else "stdout"
        stream = self._streams[rank].get(name)
        if stream is None:
            stream = self._streams[rank][name] = LineAssembler()
        if not (left_out := content.get("dropped")):
            rows = stream.feed(text, now, self._order)
            self._order = stream.order
            self._put_rows(rank, name, rows, now)
            return
        # The rank's own limit was met: these are its last lines, and what came before them is lost.
        lines, size = int(left_out.get("lines", 0)), int(left_out.get("bytes", 0))
        self._put_rows(rank, name, stream.settle(now, final=True), now)
        self._transcripts[rank].add(f"… {lines:,} lines ({size / 1e6:.1f} MB) left out on the rank …\n{text}")
        if not self._quiet:
            self._budget.exceeded = True
            self.dropped.count(rank, lines=lines, size=size)
            last = LineAssembler()
            for row in [*last.feed(text, now, self._order), *last.settle(now, final=True)]:
                self.dropped.add(rank, name, row.text, row.order)
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
            elif self._budget.take_bar(len(row.text)):
                self.fixed.append((rank, (rank, name, row.number), row.text))
            else:
                self.dropped.count(rank, lines=1, size=len(row.text))

    def _put_line(self, rank: int, name: str, row: Finished, now: float) -> None:
        line = row.text
        size = num_bytes(line) + _LABEL_SIZE
        accepted = self._accepted[rank] + size
        if (
            self._budget.over
            or rank in self._full
            or accepted > self._budget.limit
            or self.queue.memory(rank) > self._memory
        ):
            # Nothing after the first lost line is shown before the note: the output has one gap, not many.
            self._full.add(rank)
            self._budget.exceeded = self._budget.exceeded or accepted > self._budget.limit
            self.dropped.add(rank, name, line, row.order)
            return
        self._accepted[rank] = accepted
        self.queue.put(rank, Item((name, line), name, line, size, now, row.order))

    def _take_display(self, rank: int, bundle: Bundle, now: float) -> None:
        if (text := bundle.text) is not None:
            for line in [text] if len(text) <= _LABELLED_AT_ONCE else text.split("\n"):
                self._order += 1
                self._put_line(rank, "stdout", Finished(line, order=self._order), now)
            return
        size = bundle.size
        waiting = self._updates.get(bundle.display_id or "") if bundle.update else None
        if waiting is not None:
            # Only the last of several updates matters.
            waiting.payload = bundle
            self.queue.resize(rank, waiting, size)
            return
        if self.queue.memory(rank) + size > self._memory:
            self.dropped.count(rank, displays=1, size=size)
            return
        item = Item(bundle.key(), "display", bundle, size, now, self._order)
        if bundle.update and bundle.display_id:
            self._updates[bundle.display_id] = item
        self.queue.put(rank, item)

    def _take_clear(self, rank: int, wait: bool, now: float) -> None:
        for name, stream in self._streams[rank].items():
            self._put_rows(rank, name, stream.settle(now, final=True), now, bars=False)
        if self._quiet:
            return
        self.dropped.forget(rank)
        self._full.discard(rank)
        self._budget.over = False
        self._accepted[rank] = 0
        last = self.queue.last(rank)
        if last is None or last.key != ("clear", wait):
            self.queue.put(rank, Item(("clear", wait), "clear", wait, 0, now, self._order))

    def taken(self, item: Item) -> None:
        """The item has left the queue."""
        if item.kind == "display" and item.payload.update:
            self._updates.pop(item.payload.display_id, None)

    def drop(self, rank: int, item: Item) -> None:
        """The item is not shown: count it."""
        if item.kind == "display":
            self.dropped.count(rank, displays=1, size=item.size)
        elif item.kind == "bar":
            self.dropped.count(rank, lines=1, size=item.size)
        else:
            self._full.add(rank)
            self.dropped.add(rank, item.kind, item.payload, item.order)

    def settle(self, now: float, *, final: bool = False, ranks: Sequence[int] | None = None) -> None:
        """Take the rows that will not change any more out of the streams; with `final` all of them."""
        for rank in self._streams if ranks is None else ranks:
            for name, stream in self._streams[rank].items():
                self._put_rows(rank, name, stream.settle(now, final=final), now)

    def live_rows(self, now: float) -> list[LiveRow]:
        """The rows to show although they may change, by rank; none where they could not be changed."""
        rows = [
            LiveRow(
                rank, (rank, name, row.number), row.shown_text(), row.order, row.began_at, *stream.has_left(row, now)
            )
            for rank, streams in self._streams.items()
            for name, stream in streams.items()
            for row in stream.live_rows(now)
        ]
        return rows if self._in_place else []

    def next_change(self) -> float | None:
        """When time alone changes what is shown, in the clock's seconds; None: never."""
        times = [stream.next_change() for streams in self._streams.values() for stream in streams.values()]
        return min((time for time in times if time is not None), default=None)

    def _is_live(self, rank: int) -> bool:
        return any(stream.is_live for stream in self._streams[rank].values())

    def text(self, rank: int) -> str:
        """What a rank printed so far."""
        rest = [stream.unfinished for stream in self._streams[rank].values()]
        return self._transcripts[rank].text() + "\n".join(filter(None, rest))
