"""The span ring: a bounded, always-on record of this process's recent actions."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Iterator

from axon_nb.records.span import Span

__all__ = ["SpanRing", "emit", "is_suppressed", "ring", "suppress_spans"]


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


class _Thread(threading.local):
    kinds: tuple[str, ...] = ()


_thread = _Thread()


@contextlib.contextmanager
def suppress_spans(*kinds: str) -> Iterator[None]:
    """Do not record this thread's spans of these kinds separately: an enclosing span covers them."""
    before, _thread.kinds = _thread.kinds, kinds
    try:
        yield
    finally:
        _thread.kinds = before


def is_suppressed(kind: str) -> bool:
    """Whether this thread currently suppresses spans of this kind."""
    return kind in _thread.kinds


ring = SpanRing()
"""The ring of this process."""


emit = ring.emit
"""Add one span to this process's ring."""
