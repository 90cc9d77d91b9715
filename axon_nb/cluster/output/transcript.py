"""The text that one rank printed, in bounded memory."""

from __future__ import annotations

from collections import deque

__all__ = ["Transcript"]


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
