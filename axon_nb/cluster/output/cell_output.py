"""What the ranks print and display during one cell, as labelled output of the notebook."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from axon_nb.cluster.output.displays import Clears
from axon_nb.cluster.output.intake import Intake
from axon_nb.cluster.output.limits import Budget, Verdict
from axon_nb.cluster.output.live_area import LiveArea
from axon_nb.cluster.output.merge import Choice
from axon_nb.cluster.output.printer import Printer
from axon_nb.cluster.output.sinks import Sink, is_in_place

__all__ = ["CellOutput"]

FIRST_S = 0.012
"""From a message to its flush: a window in which the other ranks' same line may come."""
EVERY_S = 0.066
"""Between two flushes."""
HOLD_S = 0.06
"""A line that not all ranks have printed waits for them at most this long, or for one more flush."""


class CellOutput:
    """Fed by the client's IO thread, flushed on the notebook's thread.

    Args:
        ranks: The ranks that run the cell.
        sink: Where the output goes.
        quiet: Show nothing; `text` still has what ranks printed.
        limit_bytes: Bytes of text that the cell may show.
        clock: Seconds.
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
        self._intake = Intake(ranks, self._budget, quiet=quiet, in_place=in_place)
        self._clears = Clears()
        self._live = LiveArea(sink)
        self._printer = Printer(sink, self._live)
        self._due: float | None = None
        self._last_flush = -math.inf

    def feed(self, rank: int, msg_type: str, content: dict[str, Any], metadata: dict[str, Any]) -> bool:
        """Take in one message, from any thread; True when a flush is now due sooner than before."""
        now = self._clock()
        with self._lock:
            if not self._intake.take(rank, msg_type, content, now):
                return False
            times = []
            if self._intake.queue or self._intake.fixed:
                times.append(now + FIRST_S)
            if self._intake.touches_live:
                times.append(max(now + FIRST_S, self._live.next_at))
            if not times and (change := self._intake.next_change()) is not None:
                times.append(change)
            return self._plan(times)

    def _plan(self, times: Sequence[float]) -> bool:
        if not times:
            return False
        due = max(min(times), self._last_flush + EVERY_S)
        if self._due is not None and self._due <= due:
            return False
        self._due = due
        return True

    def rank_done(self, rank: int) -> None:
        """From any thread: the rank sends no more; its lines need not be waited for."""
        with self._lock:
            now = self._clock()
            self._intake.settle(now, final=True, ranks=[rank])
            self._intake.queue.close(rank)
            if self.quiet or not (self._intake.queue or self._intake.fixed):
                return
            if self._intake.queue.closed:
                self._due = now if self._due is None else min(self._due, now)
            else:
                self._plan([now + FIRST_S])

    def next_due(self) -> float | None:
        """When `flush` should be called next, in the clock's seconds; None when nothing is pending."""
        return self._due

    @property
    def drained(self) -> bool:
        """Whether everything that came has been shown, unfinished lines aside."""
        with self._lock:
            return self.quiet or not self._intake.queue

    def text(self, rank: int) -> str:
        """What a rank printed, progress bars in their last state: at most about a million characters."""
        with self._lock:
            return self._intake.text(rank)

    def flush(self, *, final: bool = False) -> None:
        """Show what is due; with `final` all that is left. On the notebook's thread."""
        if self.quiet:
            if final:
                with self._lock:
                    self._intake.settle(self._clock(), final=True)
            return
        with self._lock:
            now = self._clock()
            self._last_flush, self._due = now, None
            self._intake.settle(now, final=final)
            batch = self._collect(now, final=final)
            cleared, wait, batch = self._clears.apply(batch)
            fixed, self._intake.fixed = self._intake.fixed, []
            rows = self._live.in_turn(self._intake.live_rows(now), self._intake.queue.oldest(now - 2 * HOLD_S))
            if cleared:
                self._budget.cleared(sum(item.size for _, item, _ in batch if item.kind in ("stdout", "stderr")))
            closing = self._close_counts() if final else []
        if cleared:
            self._printer.clear(sorted(cleared), wait=wait)
        for rank, key, text in fixed:
            self._live.fix([rank], text, key)
        self._printer.print(batch, rows, now)
        self._live.show(rows, now, at_once=final)
        self._printer.print(closing, (), now)
        with self._lock:
            self._plan(self._times(now))

    def _collect(self, now: float, *, final: bool) -> list[Choice]:
        intake, batch = self._intake, []
        while (choice := intake.queue.peek(now, HOLD_S, final=final)) is not None:
            verdict = self._budget.judge(choice.item, now, final=final)
            if verdict is Verdict.WAIT:
                break
            intake.queue.take(choice)
            intake.taken(choice.item)
            if verdict is Verdict.SHOW:
                batch.append(choice)
                continue
            for rank in choice.ranks:
                intake.drop(rank, choice.item)
        return batch

    def _close_counts(self) -> list[Choice]:
        return self._intake.dropped.close(self._budget.limit, exceeded=self._budget.exceeded)

    def _times(self, now: float) -> list[float]:
        times = [now + EVERY_S] if self._intake.queue or self._intake.fixed else []
        if self._live.stale:
            times.append(self._live.next_at)
        if (change := self._intake.next_change()) is not None:
            times.append(change)
        return times
