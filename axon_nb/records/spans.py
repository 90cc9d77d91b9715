"""Spans: times that a rank spent on one action, in a bounded ring that is always on; and the clocks that time them.

Clocks of hosts differ. Messages between them narrow down an interval for the difference.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

GPU, LAUNCH = "gpu", "launch"
"""Whose times a span has, if not the host's: the GPU's, or those at which the host launched the GPU's work."""
_suppressed: ContextVar[tuple[str, ...]] = ContextVar("suppressed", default=())
_MAX_DRIFT = 1e-4
"""Seconds per second: two quartz clocks that differ by 50 parts per million each, in opposite directions."""


class Span(NamedTuple):
    """One finished action of one rank: a forward, a collective, a pipeline step, a cell.

    A named tuple, as one is created per communication call and a frozen dataclass takes five times as long.
    """

    rank: int
    """Rank in the default group."""
    kind: str
    """Family of the action: ``cell``, ``forward``, ``backward``, ``optimizer``, ``collective``, ``p2p``, ``wait``,
    ``data`` (waits for a DataLoader), ``gc`` (collects garbage)."""
    name: str
    """The action itself, such as ``all_reduce``."""
    start_ns: int
    """Start, nanoseconds of the host's monotonic clock."""
    end_ns: int
    """End, same clock; never before the start."""
    group: str = ""
    """Name of the process group; empty if no group is involved. Of a cell: what was slowed on purpose."""
    bytes: int = 0
    """Of the whole tensor: an all_gather's output, a reduce_scatter's input; 0 if no data moves."""
    stage: int = -1
    """Pipeline stage, -1 outside a pipeline."""
    microbatch: int = -1
    """Microbatch, -1 outside a pipeline."""
    sequence: int = 0
    """Sequence number of the collective in its group, the same on all ranks. For a pipeline action: when its rank
    started the step, in nanoseconds. 0 if unknown."""
    line: int = 0
    """Line of the cell that called it; 0 if unknown, as in calls of library threads, or while no timeline is open."""
    clock: str = ""
    """Whose times these are: `GPU`, `LAUNCH`, or empty: the host's, of work that the host did or waited for."""


span_of: Callable[[tuple[Any, ...]], Span] = functools.partial(tuple.__new__, Span)
"""Create a span from a tuple of all fields: for hot paths, as `Span(…)` takes three times as long."""


class SpanRing:
    """Keeps the most recent spans; readers continue from a position and learn how many spans they missed."""

    watched = False
    """Whether anyone is watching: spans that are costly to record are recorded only then."""

    def __init__(self, capacity: int = 16384) -> None:
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._lock = threading.Lock()
        self._next = 0

    def emit(self, span: Span) -> None:
        """Add one span; if the ring is full, the oldest is dropped."""
        with self._lock:
            self._spans.append(span)
            self._next += 1

    @property
    def position(self) -> int:
        """Position of the next span."""
        return self._next

    def since(self, position: int, limit: int = 8192) -> tuple[list[Span], int, int]:
        """Spans from `position` on, at most the last `limit`: (spans, next position, number of lost spans)."""
        with self._lock:
            end = self._next
            count = max(0, min(end - position, limit, len(self._spans)))
            fresh = list(itertools.islice(reversed(self._spans), count))[::-1]
        return fresh, end, max(0, end - position) - len(fresh)


@contextlib.contextmanager
def suppress_spans(*kinds: str) -> Iterator[None]:
    """Do not record this thread's spans of these kinds separately: an enclosing span covers them."""
    token = _suppressed.set(kinds)
    try:
        yield
    finally:
        _suppressed.reset(token)


def is_suppressed(kind: str) -> bool:
    """Whether this thread currently suppresses spans of this kind."""
    return kind in _suppressed.get()


ring = SpanRing()
"""The ring of this process."""


emit = ring.emit
"""Add one span to this process's ring."""


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """Convert spans to Chrome's trace format: one process per rank, times in microseconds."""
    events: list[dict[str, Any]] = []
    ranks = set()
    for span in spans:
        ranks.add(span.rank)
        details = {
            "group": span.group,
            "bytes": span.bytes,
            "stage": span.stage,
            "microbatch": span.microbatch,
            "clock": span.clock,
        }
        events.append(
            {
                "name": span.name,
                "cat": span.kind,
                "ph": "X",
                "ts": span.start_ns / 1e3,
                "dur": (span.end_ns - span.start_ns) / 1e3,
                "pid": span.rank,
                "tid": span.kind,
                "args": {key: value for key, value in details.items() if value not in ("", 0, -1)},
            }
        )
    names = [{"name": "process_name", "ph": "M", "pid": r, "args": {"name": f"rank {r}"}} for r in sorted(ranks)]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def write_chrome_trace(spans: Iterable[Span], path: Path | str) -> None:
    """Write the trace of `spans` to `path` as JSON."""
    Path(path).write_text(json.dumps(chrome_trace(spans)))


def covered_ns(intervals: Iterable[tuple[int, int]], begin: int, end: int) -> int:
    """Nanoseconds between `begin` and `end` covered by at least one (begin, end) interval."""
    total, reached = 0, begin
    for first, last in sorted(intervals):
        left, right = max(first, reached), min(last, end)
        if right > left:
            total += right - left
            reached = right
    return total


class HostClock(Struct, frozen=True):
    """How the monotonic clock of another host is related to this host's."""

    offset_ns: int
    """What to add to its times to get this host's, in nanoseconds."""
    error_ns: int
    """By how much the offset may be wrong, in nanoseconds."""


class ClockEstimate:
    """Follows the clock of another host over the messages that are exchanged with it anyway."""

    def __init__(self) -> None:
        self._low = self._high = 0.0
        self._at_ns: int | None = None
        """When the last answer arrived; None: none has."""

    def add(self, asked_ns: int, received_ns: int, replied_ns: int, returned_ns: int) -> None:
        """Add an exchange.

        Args:
            asked_ns: When the question was sent, on this host's clock, as all times in nanoseconds.
            received_ns: When it was received, on the other host's clock.
            replied_ns: When the answer was sent, on the other host's clock.
            returned_ns: When the answer was received, on this host's clock.
        """
        low, high = asked_ns - received_ns, returned_ns - replied_ns
        if high < low:  # a clock was set between question and answer
            return
        drift = 0.0 if self._at_ns is None else _MAX_DRIFT * (returned_ns - self._at_ns)
        bounds = max(low, self._low - drift), min(high, self._high + drift)
        if self._at_ns is None or bounds[0] > bounds[1]:  # the other host was suspended: earlier exchanges are void
            bounds = low, high
        (self._low, self._high), self._at_ns = bounds, returned_ns

    def at(self, now_ns: int) -> HostClock | None:
        """Return the estimate for a time of this host's clock, in nanoseconds; None before the first exchange."""
        if self._at_ns is None:
            return None
        error = (self._high - self._low) / 2 + _MAX_DRIFT * max(0, now_ns - self._at_ns)
        return HostClock(round((self._low + self._high) / 2), round(error))
