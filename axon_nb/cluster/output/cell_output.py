"""Turns what the ranks print and display during one cell into labelled output of the notebook."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from axon_nb.cluster.output.displays import PendingClears
from axon_nb.cluster.output.limits import Budget, Verdict
from axon_nb.cluster.output.live_area import LiveArea
from axon_nb.cluster.output.merge import Choice
from axon_nb.cluster.output.parser import OutputParser
from axon_nb.cluster.output.printer import Printer
from axon_nb.cluster.output.shown import ShownOutput
from axon_nb.cluster.output.sinks import Sink, is_in_place

FLUSH_DELAY_S = 0.012
"""From a message to its flush: a window in which the other ranks may send the same line."""
FLUSH_INTERVAL_S = 0.066
"""Shortest interval between two flushes."""
HOLD_S = 0.06
"""A line that not all ranks have printed waits for them at most this long, or for one more flush."""


class CellOutput:
    """Collects a cell's output on the client's I/O thread, and shows it on the notebook's thread.

    Args:
        ranks: The ranks that run the cell.
        sink: Where the output goes.
        quiet: Whether to show nothing; `text` still returns what ranks printed.
        limit_bytes: Maximum number of bytes of text to show.
        clock: Returns seconds.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        sink: Sink,
        *,
        quiet: bool = False,
        limit_bytes: int = 1 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.quiet = quiet
        self._clock = clock
        in_place = is_in_place(sink)
        self._lock = threading.Lock()
        self._budget = Budget(limit_bytes, paced=in_place)
        self._parser = OutputParser(ranks, self._budget, quiet=quiet, in_place=in_place)
        self._clears = PendingClears()
        self._shown = ShownOutput()
        self._live = LiveArea(sink)
        self._printer = Printer(sink, self._live)
        self._due: float | None = None
        self._last_flush = -math.inf

    def feed(self, rank: int, msg_type: str, content: dict[str, Any], metadata: dict[str, Any]) -> bool:
        """Process one message, on any thread; return whether a flush is now due sooner than before."""
        now = self._clock()
        with self._lock:
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
            notes = self._omission_notes() if final else []
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
        parser, batch = self._parser, []
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

    def _omission_notes(self) -> list[Choice]:
        return self._parser.omitted.close(self._budget.limit, exceeded=self._budget.exceeded)

    def _flush_times(self, now: float) -> list[float]:
        times = [now + FLUSH_INTERVAL_S] if self._parser.queue or self._parser.finished_bars else []
        if self._live.stale:
            times.append(self._live.next_at)
        if (change := self._parser.next_change()) is not None:
            times.append(change)
        return times
