"""Turns what the ranks print and display, during a cell and between cells, into labelled output of the notebook.

Streams are sent in as few pieces as their order permits. A rank's `clear_output` removes only what that rank has shown.
What ranks, their threads and child processes print while no cell runs is shown first by the next cell.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct

from axon_nb.cluster.output.limits import Budget, Verdict
from axon_nb.cluster.output.merge import Choice, Item
from axon_nb.cluster.output.parser import Bundle, OutputParser, PendingClears
from axon_nb.cluster.output.sinks import LiveArea, LiveRow, Sink, StreamName, is_in_place, label, labelled

FLUSH_DELAY_S = 0.012
"""From a message to its flush: a window in which the other ranks may send the same line."""
FLUSH_INTERVAL_S = 0.066
"""Shortest interval between two flushes."""
HOLD_S = 0.06
"""A line that not all ranks have printed waits for them at most this long, or for one more flush."""
_MAX_PIECES = 20
"""Maximum number of pieces in one flush, because Jupyter's server limits messages, too.

With more pieces, stdout and stderr are no longer interleaved.
"""
_MAX_SHOWN_BYTES = 2 << 20
_NOT_SHOWN_AGAIN = "… earlier output is not shown again …"
_BETWEEN_CELLS_HEAD = "Since the last cell:\n"
_INDENT = "  "
_SHOWN_MESSAGES = ("stream", "display_data", "update_display_data")


class CellOutput:
    """Collects a cell's output on the client's I/O thread, and shows it on the notebook's thread.

    Args:
        ranks: The ranks that run the cell.
        sink: Where the output goes.
        quiet: Whether to show nothing; `text` still returns what ranks printed.
        limit_bytes: Maximum number of bytes of text to show.
        at_end: Whether to show nothing but bars before all ranks are done, so that the order does not depend on time.
        clock: Returns seconds.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        sink: Sink,
        *,
        quiet: bool = False,
        limit_bytes: int = 1 << 20,
        at_end: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.quiet = quiet
        self._at_end = at_end
        self._clock = clock
        in_place = is_in_place(sink)
        self._lock = threading.Lock()
        self._budget = Budget(limit_bytes, paced=in_place)
        self._parser = OutputParser(ranks, self._budget, quiet=quiet, in_place=in_place)
        self._clears = PendingClears()
        self._shown = ShownOutput()
        self._live = LiveArea(sink)
        self._printer = Printer(sink, self._live)
        self._was_fed = False
        self._due: float | None = None
        self._last_flush = -math.inf

    def feed(self, rank: int, msg_type: str, content: dict[str, Any], metadata: dict[str, Any]) -> bool:
        """Process one message, on any thread; return whether a flush is now due sooner than before."""
        now = self._clock()
        with self._lock:
            self._was_fed = True
            if not self._parser.feed(rank, msg_type, content, now):
                return False
            times = []
            if self._parser.queue or self._parser.finished_bars:
                times.append(now + FLUSH_DELAY_S)
            if self._parser.touched_live_rows:
                times.append(max(now + FLUSH_DELAY_S, self._live.next_at))
            if not times and (change := self._parser.next_change()) is not None:
                times.append(change)
            return self._schedule(times)

    def _schedule(self, times: Sequence[float]) -> bool:
        if not times:
            return False
        due = max(min(times), self._last_flush + FLUSH_INTERVAL_S)
        if self._due is not None and self._due <= due:
            return False
        self._due = due
        return True

    def rank_done(self, rank: int) -> None:
        """Record that the rank sends no more output, so that nothing waits for it; callable from any thread."""
        with self._lock:
            if not self._was_fed:
                self._parser.queue.close(rank)
                return
            now = self._clock()
            self._parser.settle(now, final=True, ranks=[rank])
            self._parser.queue.close(rank)
            if self.quiet or not (self._parser.queue or self._parser.finished_bars):
                return
            if self._parser.queue.closed:
                self._due = now if self._due is None else min(self._due, now)
            else:
                self._schedule([now + FLUSH_DELAY_S])

    def next_due(self) -> float | None:
        """Return when `flush` should be called next, in the clock's seconds; None if nothing is pending."""
        return self._due

    @property
    def drained(self) -> bool:
        """Whether all output received so far has been shown, except unfinished lines."""
        with self._lock:
            return self.quiet or not self._parser.queue

    def text(self, rank: int) -> str:
        """Return what a rank printed, with progress bars in their last state; at most about a million characters."""
        with self._lock:
            return self._parser.text(rank)

    def flush(self, *, final: bool = False) -> None:
        """Show what is due, or with `final` everything; on the notebook's thread."""
        if not self._was_fed:
            return
        if self.quiet:
            if final:
                with self._lock:
                    self._parser.settle(self._clock(), final=True)
            return
        with self._lock:
            now = self._clock()
            self._last_flush, self._due = now, None
            self._parser.settle(now, final=final)
            batch = self._next_batch(now, final=final)
            cleared, batch = self._clears.apply(batch)
            if cleared and not (self._shown.includes(cleared) or self._live.includes(cleared)):
                cleared = set()
            if cleared:
                batch = self._shown.clear(cleared, batch)
            else:
                self._shown.add(batch)
            finished_bars, self._parser.finished_bars = self._parser.finished_bars, []
            rows = self._live.showable(self._parser.live_rows(now), self._parser.queue.oldest(now - 2 * HOLD_S))
            if cleared:
                self._budget.reset(sum(item.size for _, item, _ in batch if item.kind in ("stdout", "stderr")))
            omitted, budget = self._parser.omitted, self._budget
            notes = omitted.close(budget.limit, exceeded=budget.exceeded) if final else []
        if cleared:
            self._printer.clear(sorted(cleared), wait=bool(batch))
        for rank, key, text in finished_bars:
            self._live.finish([rank], text, key)
        self._printer.print(batch, rows, now)
        self._live.show(rows, now, force=final)
        self._printer.print(notes, (), now)
        with self._lock:
            self._schedule(self._flush_times(now))

    def _next_batch(self, now: float, *, final: bool) -> list[Choice]:
        parser, batch = self._parser, list[Choice]()
        if self._at_end and not (final or parser.queue.closed):
            return batch
        while (choice := parser.queue.peek(now, HOLD_S, final=final)) is not None:
            verdict = self._budget.judge(choice.item, now, final=final)
            if verdict is Verdict.WAIT:
                break
            parser.queue.take(choice)
            parser.forget_update(choice.item)
            if verdict is Verdict.SHOW:
                batch.append(choice)
                continue
            for rank in choice.ranks:
                parser.omit(rank, choice.item)
        return batch

    def _flush_times(self, now: float) -> list[float]:
        times = [now + FLUSH_INTERVAL_S] if self._parser.queue or self._parser.finished_bars else []
        if self._live.stale:
            times.append(self._live.next_at)
        if (change := self._parser.next_change()) is not None:
            times.append(change)
        return times


class Printer:
    """Formats output; keeps no state between calls except that of the live area."""

    def __init__(self, sink: Sink, live: LiveArea) -> None:
        self._sink = sink
        self._live = live
        self._pieces: list[tuple[StreamName, list[str]]] = []
        self._num_sent = 0
        self._first_order = 0

    def clear(self, ranks: Sequence[int], *, wait: bool) -> None:
        """Clear the cell's output on behalf of `ranks`."""
        self._live.clear(ranks)
        self._sink.clear(wait=wait)

    def print(self, batch: Sequence[Choice], rows: Sequence[LiveRow], now: float) -> None:
        """Show items in order, with the live area where its first row started.

        Args:
            batch: The items to show.
            rows: The live rows.
            now: The time in seconds.
        """
        self._num_sent = 0
        live_order = self._live.next_row_order(rows)
        bars = False
        for ranks, item, order in batch:
            if bars and item.kind != "bar":
                self._send()
                self._live.show(self._live.members(rows), now)
            if live_order is not None and order > live_order:
                self._send()
                self._live.show(self._live.showable(rows, order), now)
                live_order = self._live.next_row_order(rows)
            bars = item.kind == "bar"
            if bars:
                self._send()
                self._live.finish(ranks, item.payload)
            elif item.kind == "display":
                self._print_display(ranks, item.payload, order)
            else:
                name: StreamName = "stderr" if item.kind == "stderr" else "stdout"
                self._write(name, labelled(ranks, item.payload), order)
        self._send()

    def _print_display(self, ranks: Sequence[int], bundle: Bundle, order: int) -> None:
        if not bundle.update:
            self._write("stdout", f"{label(ranks)}\n", order)
            self._send()
        self._sink.display(bundle.data, bundle.metadata, display_id=bundle.display_id, update=bundle.update)

    def _write(self, name: StreamName, text: str, order: int) -> None:
        if not self._pieces:
            self._first_order = order
        if not self._pieces or self._pieces[-1][0] != name:
            self._pieces.append((name, []))
        self._pieces[-1][1].append(text)

    def _send(self) -> None:
        num_left = max(2, _MAX_PIECES - self._num_sent)
        if len(self._pieces) > num_left:
            rest = self._pieces[num_left - 2 :]
            self._pieces[num_left - 2 :] = [
                (name, [text for other, texts in rest if other == name for text in texts])
                for name in (rest[0][0], rest[1][0])
            ]
        for name, texts in self._pieces:
            self._sink.stream(name, "".join(texts))
        if self._pieces:
            self._num_sent += len(self._pieces)
            self._live.output_shown(self._first_order)
            self._pieces = []


class _Entry(Struct):
    choice: Choice
    position: float
    """Entries are shown in this order, then in that of their arrival."""


class ShownOutput:
    """Holds the output of a cell since the last complete clear; of more than 2 MiB, only the end."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._size = 0
        self._omitted: set[int] = set()
        """The ranks whose first output is no longer held."""
        self._positions: dict[int, float] = {}
        """By rank, where the output begins that replaces what the rank cleared."""

    def add(self, batch: Iterable[Choice]) -> None:
        """Record output that is shown below all other."""
        for choice in batch:
            if choice.item.kind != "bar" and not self._update(choice.item):
                self._entries.append(_Entry(choice, choice.order))
                self._size += choice.item.size
                for rank in choice.ranks:
                    self._positions.setdefault(rank, choice.order)
        while self._size > _MAX_SHOWN_BYTES and self._entries:
            first = self._entries.pop(0).choice
            self._size -= first.item.size
            self._omitted.update(first.ranks)

    def _update(self, item: Item) -> bool:
        """Apply an update of a display; return whether it is one."""
        update = item.payload if item.kind == "display" else None
        if not isinstance(update, Bundle) or not update.update:
            return False
        for entry in self._entries:
            shown = entry.choice.item
            if shown.kind == "display" and shown.payload.display_id == update.display_id:
                self._size += item.size - shown.size
                shown.payload, shown.size = update._replace(update=False), item.size
        return True

    def includes(self, ranks: set[int]) -> bool:
        """Whether one of the ranks has shown something."""
        return any(rank in ranks for entry in self._entries for rank in entry.choice.ranks)

    def clear(self, cleared: set[int], batch: Sequence[Choice]) -> list[Choice]:
        """Remove what the ranks `cleared` have shown, and add what they show instead, where that was.

        Returns:
            All that is to be shown again, in order.
        """
        remaining = []
        for entry in self._entries:
            ranks, item, order = entry.choice
            if left := [rank for rank in ranks if rank not in cleared]:
                remaining.append(_Entry(Choice(left, item, order), entry.position))
        for choice in batch:
            if self._update(choice.item):
                continue
            begins = [self._positions[rank] for rank in choice.ranks if rank in cleared and rank in self._positions]
            remaining.append(_Entry(choice, min(begins, default=choice.order)))
        self._omitted -= cleared
        remaining.sort(key=lambda entry: (entry.position, entry.choice.order))
        shown = [entry.choice for entry in remaining]
        self._entries = [entry for entry in remaining if entry.choice.item.kind != "bar"]
        self._size = sum(entry.choice.item.size for entry in self._entries)
        if self._omitted:
            note = Item(("stdout", _NOT_SHOWN_AGAIN), "stdout", _NOT_SHOWN_AGAIN, len(_NOT_SHOWN_AGAIN), 0.0)
            shown.insert(0, Choice(sorted(self._omitted), note, 0))
        return shown


class BetweenCells:
    """Holds output between cells, at most as much as one cell may show.

    Args:
        ranks: All ranks.
        limit_bytes: Maximum number of bytes of text to hold.
    """

    def __init__(self, ranks: Sequence[int], *, limit_bytes: int) -> None:
        self._ranks = list(ranks)
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._sink = _DelegatingSink()
        self._pending: CellOutput | None = None

    def feed(self, rank: int, msg_type: str, content: dict[str, Any]) -> None:
        """Hold one message of a rank; called from the client's IO thread."""
        if msg_type not in _SHOWN_MESSAGES:
            return
        with self._lock:
            if self._pending is None:
                self._pending = CellOutput(self._ranks, self._sink, limit_bytes=self._limit)
            self._pending.feed(rank, msg_type, content, {})

    def show(self, sink: Sink) -> None:
        """Show what is held, labelled as earlier than the cell that is about to run; on the notebook's thread."""
        with self._lock:
            pending, self._pending = self._pending, None
        if pending is not None:
            self._sink.target, self._sink.has_head = sink, False
            pending.flush(final=True)


class _DelegatingSink:
    """Shows a head and indented text in a sink that is only known when there is a cell."""

    target: Sink
    has_head = False
    in_place = True

    def stream(self, name: StreamName, text: str) -> None:
        self._show_head(name)
        self.target.stream(name, "".join(_INDENT + line for line in text.splitlines(keepends=True)))

    def display(self, data: dict[str, Any], metadata: dict[str, Any], *, display_id: str | None, update: bool) -> None:
        self._show_head("stdout")
        self.target.display(data, metadata, display_id=display_id, update=update)

    def clear(self, *, wait: bool) -> None:
        """Nothing: what other cells have shown stays."""

    def _show_head(self, name: StreamName) -> None:
        if not self.has_head:
            self.has_head = True
            self.target.stream(name, _BETWEEN_CELLS_HEAD)
