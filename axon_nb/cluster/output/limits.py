"""How much one cell may show: a total, and a rate."""

from __future__ import annotations

import enum
from collections import deque

from axon_nb.cluster.output.merge import Item

__all__ = ["Budget", "Rate", "Verdict"]

RATE = 400_000
"""Bytes in any one second. Jupyter's server drops every message of a kernel that sends 1 MB of text a second."""
_AT_ONCE = 2_000_000
"""Bytes that the end of a cell may send in one go: the server takes its 1 MB/s over 3 s."""
_DISPLAY_COST = 4000
"""Least cost of a display, bytes: the server also counts messages, at most 1000 a second."""
_DISPLAY_SHARE = 32
"""Displays may take this many times the limit of text; text is what floods, pictures are wanted."""
_MAX_DISPLAYS = 1000


class Verdict(enum.Enum):
    """What becomes of an item."""

    SHOW = enum.auto()
    WAIT = enum.auto()
    DROP = enum.auto()


class Rate:
    """At most `limit` bytes in any second."""

    def __init__(self, limit: int = RATE) -> None:
        self._limit = limit
        self._sent: deque[tuple[float, int]] = deque()
        self._sum = 0

    def allows(self, size: int, now: float) -> bool:
        """Whether `size` bytes may go now; they always may when nothing went within the last second."""
        while self._sent and now - self._sent[0][0] >= 1.0:
            self._sum -= self._sent.popleft()[1]
        return not self._sum or self._sum + size <= self._limit

    def take(self, size: int, now: float) -> None:
        """`size` bytes go now."""
        self._sum += size
        if self._sent and self._sent[-1][0] == now:
            size += self._sent.pop()[1]
        self._sent.append((now, size))


class Budget:
    """What one cell may still show.

    Args:
        limit: Bytes of text.
        paced: Whether to keep to the rate that Jupyter's server takes.
    """

    def __init__(self, limit: int, *, paced: bool = True) -> None:
        self.limit = limit
        self.over = False
        """Whether the limit has been met: no more text is shown."""
        self.exceeded = False
        """Whether anything was left out because of the limit."""
        self._paced = paced
        self._rate = Rate()
        self._text = self._displays = self._num_displays = self._bars = self._last = 0

    def judge(self, item: Item, now: float, *, final: bool = False) -> Verdict:
        """Whether an item may be shown now; when it may, it counts."""
        if item.kind == "clear":
            return Verdict.SHOW
        if item.kind == "display":
            return self._judge_display(item, now, final=final)
        if item.kind == "bar":
            return Verdict.SHOW if self.take_bar(item.size) else Verdict.DROP
        if self.over or self._text + item.size > self.limit:
            self.over = self.exceeded = True
            return Verdict.DROP
        if final and self._paced and self._last + item.size > _AT_ONCE:
            return Verdict.DROP
        if not final and self._paced and not self._rate.allows(item.size, now):
            return Verdict.WAIT
        self._rate.take(item.size, now)
        self._text += item.size
        self._last += item.size if final else 0
        return Verdict.SHOW

    def _judge_display(self, item: Item, now: float, *, final: bool) -> Verdict:
        is_update = item.payload.update
        if not is_update and (
            self._displays + item.size > _DISPLAY_SHARE * self.limit or self._num_displays >= _MAX_DISPLAYS
        ):
            self.exceeded = True
            return Verdict.DROP
        cost = max(_DISPLAY_COST, item.size // 10)
        if not final and self._paced and not self._rate.allows(cost, now):
            return Verdict.WAIT
        self._rate.take(cost, now)
        if not is_update:
            self._displays += item.size
            self._num_displays += 1
        return Verdict.SHOW

    def take_bar(self, size: int) -> bool:
        """Whether a finished bar of `size` bytes may stay; bars have a limit of their own, as large as that of text."""
        if self._bars + size > self.limit:
            self.exceeded = True
            return False
        self._bars += size
        return True

    def cleared(self, text: int) -> None:
        """The cell's output was cleared: what was shown no longer counts, but for `text` bytes that follow."""
        self.over = False
        self._text, self._displays, self._num_displays, self._bars = text, 0, 0, 0
