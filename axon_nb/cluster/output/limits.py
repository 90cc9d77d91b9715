"""How much one cell may show: a total, a rate, and an honest count of what was left out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["Allowance", "Dropped"]

_TAIL_LINES = 40


class Allowance:
    """A token bucket: at most `rate` bytes in any second. Jupyter's server drops all messages above 1 MB/s."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._tokens = rate
        self._at = now

    def take(self, size: int, now: float) -> bool:
        """Whether `size` bytes may go now."""
        self._tokens = min(self._rate, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < min(size, self._rate):
            return False
        self._tokens -= size
        return True


class Dropped:
    """Counts what is not shown, by rank, and keeps the last lines."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._lines = dict.fromkeys(ranks, 0)
        self._bytes = dict.fromkeys(ranks, 0)
        self.tail: deque[tuple[int, str, str]] = deque()
        """(rank, stream, line) of the last lines."""

    def add_line(self, rank: int, stream: str, line: str) -> None:
        """One line that is over the limit."""
        self.tail.append((rank, stream, line))
        if len(self.tail) > _TAIL_LINES:
            lost, _, text = self.tail.popleft()
            self.count(lost, 1, len(text) + 1)

    def count(self, rank: int, lines: int, size: int) -> None:
        """Lines that the rank itself has left out."""
        self._lines[rank] += lines
        self._bytes[rank] += size

    def notes(self, limit: int) -> list[tuple[int, str]]:
        """(rank, sentence) for each rank with something left out."""
        return [
            (
                rank,
                (
                    f"… {self._lines[rank]:,} lines ({size / 1e6:.1f} MB) not shown: a cell shows {limit / 2**20:.3g} "
                    "MiB; `%distributed config output_limit=4MiB` raises that …"
                ),
            )
            for rank, size in self._bytes.items()
            if size
        ]
