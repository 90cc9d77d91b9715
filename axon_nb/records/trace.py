"""The span ring: what this process has done lately. Always on, bounded, cheap; read by whoever looks."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Iterator

from axon_nb.records.span import Span

__all__ = ["SpanRing", "emit", "is_told", "ring", "told_as_one"]


class SpanRing:
    """Keeps the last spans; readers follow it by a running number, and learn how many they missed."""

    watched = False
    """Whether somebody looks now: what is worth its cost only then is recorded besides."""

    def __init__(self, capacity: int = 16384) -> None:
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._lock = threading.Lock()
        self._next = 0

    def emit(self, span: Span) -> None:
        """Add one span; the oldest goes when the ring is full."""
        with self._lock:
            self._spans.append(span)
            self._next += 1

    @property
    def position(self) -> int:
        """The number the next span will get."""
        return self._next

    def since(self, position: int, limit: int = 8192) -> tuple[list[Span], int, int]:
        """The spans from number `position` on: (spans, next position, how many were lost), at most the last `limit`."""
        with self._lock:
            end = self._next
            count = max(0, min(end - position, limit, len(self._spans)))
            fresh = list(itertools.islice(reversed(self._spans), count))[::-1]
        return fresh, end, max(0, end - position) - len(fresh)


class _Thread(threading.local):
    kinds: tuple[str, ...] = ()


_thread = _Thread()


@contextlib.contextmanager
def told_as_one(*kinds: str) -> Iterator[None]:
    """Within it what this thread does of these kinds is part of one span, and is not recorded by itself."""
    before, _thread.kinds = _thread.kinds, kinds
    try:
        yield
    finally:
        _thread.kinds = before


def is_told(kind: str) -> bool:
    """Whether this thread is within a span that tells what is of this kind."""
    return kind in _thread.kinds


ring = SpanRing()
"""The ring of this process."""


emit = ring.emit
"""Add one span to this process's ring."""
