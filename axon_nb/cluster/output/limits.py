"""Limits how much one cell shows, in total and per second; counts what is omitted and keeps its last lines."""

from __future__ import annotations

import bisect
import enum
import operator
from collections import Counter, defaultdict, deque
from typing import NamedTuple

from axon_nb.cluster.output.merge import Choice, Item, MergeQueue
from axon_nb.cluster.output.sinks import num_bytes
from axon_nb.records.ranks import ranks_by
from axon_nb.records.units import count_of, exact_bytes

RATE = 400_000
"""Maximum number of bytes in any second. Jupyter's server drops all messages of a kernel that sends 1 MB/s of text."""
_MAX_FINAL_BYTES = 2_000_000
"""Maximum number of bytes sent at once at the end of a cell: the server averages its 1 MB/s over 3 s."""
_MIN_DISPLAY_COST = 1000
"""Minimum cost of a display and its label, in bytes: the server also limits messages, to 1000 per second."""
_DISPLAY_FACTOR = 32
"""The limit of displays, as a multiple of the limit of text: runaway output is text, pictures are intended."""
_MAX_DISPLAYS = 1000
_TAIL_LINES = 40
_TAIL_WIDTH = 2000
_order = operator.attrgetter("order")


class Verdict(enum.Enum):
    """What to do with an item."""

    SHOW = enum.auto()
    WAIT = enum.auto()
    DROP = enum.auto()


class Rate:
    """Allows at most `limit` bytes in any second."""

    def __init__(self, limit: int = RATE) -> None:
        self._limit = limit
        self._sent: deque[tuple[float, int]] = deque()
        self._sum = 0

    def allows(self, size: int, now: float) -> bool:
        """Return whether `size` bytes may be sent now; always true if nothing was sent within the last second."""
        while self._sent and now - self._sent[0][0] >= 1.0:
            self._sum -= self._sent.popleft()[1]
        return not self._sum or self._sum + size <= self._limit

    def take(self, size: int, now: float) -> None:
        """Record that `size` bytes are sent now."""
        self._sum += size
        if self._sent and self._sent[-1][0] == now:
            size += self._sent.pop()[1]
        self._sent.append((now, size))


class Budget:
    """How much one cell may still show.

    Args:
        limit: Maximum number of bytes of text.
        paced: Whether to stay below the rate limit of Jupyter's server.
    """

    def __init__(self, limit: int, *, paced: bool = True) -> None:
        self.limit = limit
        self.over = False
        """Whether the limit was reached, after which no more text is shown."""
        self.exceeded = False
        """Whether anything was omitted because of the limit."""
        self._paced = paced
        self._rate = Rate()
        self._text = self._displays = self._num_displays = self._bars = self._last = 0

    def judge(self, item: Item, now: float, *, final: bool = False) -> Verdict:
        """Decide whether an item may be shown now; if so, charge it to the budget."""
        if item.kind == "clear":
            return Verdict.SHOW
        if item.kind == "display":
            return self._judge_display(item, now, final=final)
        if item.kind == "bar":
            return Verdict.SHOW if self.spend_bar(item.size) else Verdict.DROP
        if self.over or self._text + item.size > self.limit:
            self.over = self.exceeded = True
            return Verdict.DROP
        if final and self._paced and self._last + item.size > _MAX_FINAL_BYTES:
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
            self._displays + item.size > _DISPLAY_FACTOR * self.limit or self._num_displays >= _MAX_DISPLAYS
        ):
            self.exceeded = True
            return Verdict.DROP
        cost = max(_MIN_DISPLAY_COST, item.size // 10)
        if not final and self._paced and not self._rate.allows(cost, now):
            return Verdict.WAIT
        self._rate.take(cost, now)
        if not is_update:
            self._displays += item.size
            self._num_displays += 1
        return Verdict.SHOW

    def spend_bar(self, size: int) -> bool:
        """Charge a finished bar of `size` bytes if possible; bars have a separate limit, as large as that of text."""
        if self._bars + size > self.limit:
            self.exceeded = True
            return False
        self._bars += size
        return True

    def reset(self, text: int) -> None:
        """Reset the budget after a clear, with `text` bytes of text that follow it already charged."""
        self.over = False
        self._text, self._displays, self._num_displays, self._bars = text, 0, 0, 0


class _Line(NamedTuple):
    """One of the last lines."""

    order: int
    text: str
    size: int
    """Size in bytes, as printed."""


class OmittedOutput:
    """Counts what is not shown, by rank, and keeps the last lines of each rank."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._tails: defaultdict[tuple[int, str], deque[_Line]] = defaultdict(deque)

    def add(self, rank: int, name: str, text: str, order: int) -> None:
        """Add one or more lines of a stream that exceed the limit; those with the highest `order` are the last ones."""
        tail = self._tails[rank, name]
        for line in text.split("\n"):
            entry = _Line(order, _narrow(line), num_bytes(line) + 1)
            if not tail or order >= tail[-1].order:
                tail.append(entry)
            else:
                bisect.insort(tail, entry, key=_order)
            if len(tail) > _TAIL_LINES:
                self.count(rank, lines=1, size=tail.popleft().size)

    def count(self, rank: int, *, lines: int = 0, size: int = 0, displays: int = 0) -> None:
        """Count lines, bytes or displays that are not shown."""
        count = self._counts[rank]
        count["lines"] += lines
        count["size"] += size
        count["displays"] += displays

    def forget(self, rank: int) -> None:
        """Forget a rank's counts and lines, because its output was cleared."""
        self._counts.pop(rank, None)
        for name in ("stdout", "stderr"):
            self._tails.pop((rank, name), None)

    def close(self, limit: int, *, exceeded: bool) -> list[Choice]:
        """Return notes on what was omitted, and the last lines; reset the counts.

        Args:
            limit: Maximum number of bytes of text that the cell shows.
            exceeded: Whether output was omitted because of that limit; else it was too much at once.
        """
        last_lines = self._last_lines()
        counted = sorted(self._counts.items())
        by_count = ranks_by(((count["lines"], count["displays"], count["size"]), rank) for rank, count in counted)
        notes = [
            Choice(ranks, Item(sentence, "stderr", sentence, 0, 0.0))
            for counts, ranks in by_count.items()
            if any(counts)
            for sentence in [_sentence(*counts, limit, each=len(ranks) > 1, exceeded=exceeded)]
        ]
        self._counts.clear()
        self._tails.clear()
        return [*notes, *last_lines]

    def _last_lines(self) -> list[Choice]:
        # Ranks with equal lines show 40 each; many ranks with different lines show 2 each.
        ranks = sorted({rank for rank, _ in self._tails})
        for num_lines in (_TAIL_LINES, 20, 10, 5, 2):
            queue = MergeQueue(ranks)
            for rank in ranks:
                lines = [
                    (line.order, name, line.text)
                    for name in ("stdout", "stderr")
                    for line in [*self._tails.get((rank, name), ())][-num_lines:]
                ]
                for _, name, text in sorted(lines, key=operator.itemgetter(0)):
                    queue.put(rank, Item((name, text), name, text, 0, 0.0))
            shown = _drain(queue)
            if len(shown) <= _TAIL_LINES + 8:
                break
        for (rank, _), tail in self._tails.items():
            for line in [*tail][:-num_lines]:
                self.count(rank, lines=1, size=line.size)
        return shown


def _drain(queue: MergeQueue) -> list[Choice]:
    drained = []
    while (choice := queue.peek(0.0, 0.0, final=True)) is not None:
        queue.take(choice)
        drained.append(choice)
    return drained


def _narrow(line: str) -> str:
    return line if len(line) <= _TAIL_WIDTH else f"{line[:_TAIL_WIDTH]} … {len(line) - _TAIL_WIDTH:,} more characters …"


def _sentence(lines: int, displays: int, size: int, limit: int, *, each: bool, exceeded: bool) -> str:
    parts = [count_of(number, noun) for number, noun in ((lines, "line"), (displays, "display")) if number]
    amount = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
    what = f"… {' and '.join(parts) or 'text'} ({amount}){' each' if each else ''} not shown: "
    if not exceeded:
        return what + "too much at once for a notebook …"
    larger = max(4, -(-4 * limit // 2**20))
    return what + (
        f"the limit is {exact_bytes(limit)} per cell; run `%distributed config output_limit={larger}MiB` to raise it …"
    )
