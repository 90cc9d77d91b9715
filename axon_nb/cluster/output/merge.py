"""Merges the ranks' pending output: chooses the next item, and the ranks that share it."""

from __future__ import annotations

import bisect
import operator
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from math import inf
from typing import Any, NamedTuple

from msgspec import Struct

_order = operator.attrgetter("order")
_OVERHEAD = 350
"""Memory of an item in addition to its text, in bytes."""


class Item(Struct):
    """One line, bar or display of one rank."""

    key: Hashable
    """Equal for items that are shown once if several ranks send them."""
    kind: str
    """``stdout``, ``stderr``, ``bar``, ``display`` or ``clear``."""
    payload: Any
    size: int
    """Size in bytes."""
    at: float
    """Arrival time in seconds."""
    order: int = 0
    """Higher for items that arrived later."""


class Choice(NamedTuple):
    """The next item to show, and the ranks that sent it."""

    ranks: list[int]
    item: Item
    order: int = 0
    """The lowest order of the item on these ranks."""


class MergeQueue:
    """One queue per rank. Each rank's order is preserved; if it permits, equal items of several ranks are merged.

    With many ranks a choice looks at few of them: which ranks have an item, at the head or behind it, is kept by key.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._queues: dict[int, deque[Item]] = {rank: deque() for rank in ranks}
        self._keys: dict[int, Counter[Hashable]] = {rank: Counter() for rank in ranks}
        self._memory = dict.fromkeys(ranks, 0)
        self._open = set(ranks)
        self._busy: list[int] = []
        """The ranks with pending items, sorted."""
        self._heads: dict[Hashable, set[int]] = {}
        """The ranks that have an item with this key at the head."""
        self._holders: dict[Hashable, set[int]] = {}
        """The ranks that have one anywhere."""
        self._num_silent = len(self._open)
        """Number of open ranks without pending items."""

    def put(self, rank: int, item: Item) -> None:
        """Add an item at the end, or before items with a higher order."""
        queue = self._queues[rank]
        head = queue[0] if queue else None
        if not queue or queue[-1].order <= item.order:
            queue.append(item)
        else:
            bisect.insort(queue, item, key=_order)
        self._keys[rank][item.key] += 1
        self._holders.setdefault(item.key, set()).add(rank)
        self._memory[rank] += item.size + _OVERHEAD
        self._set_head(rank, head)

    def _set_head(self, rank: int, before: Item | None) -> None:
        queue = self._queues[rank]
        now = queue[0] if queue else None
        if now is before:
            return
        if before is not None:
            _discard(self._heads, before.key, rank)
        if now is not None:
            self._heads.setdefault(now.key, set()).add(rank)
        if before is None:
            bisect.insort(self._busy, rank)
            self._num_silent -= rank in self._open
        elif now is None:
            del self._busy[bisect.bisect_left(self._busy, rank)]
            self._num_silent += rank in self._open

    def close(self, rank: int) -> None:
        """Record that the rank sends nothing more."""
        if rank in self._open:
            self._open.remove(rank)
            self._num_silent -= not self._queues[rank]

    @property
    def closed(self) -> bool:
        """Whether all ranks are closed."""
        return not self._open

    def __bool__(self) -> bool:
        return bool(self._busy)

    def oldest(self, since: float) -> float:
        """Return the lowest order of the pending items that arrived after `since`; infinity if there are none."""
        heads = (self._queues[rank][0] for rank in self._busy)
        return min((head.order for head in heads if head.at > since), default=inf)

    def memory(self, rank: int) -> int:
        """Return the approximate size of a rank's pending items, in bytes."""
        return self._memory[rank]

    def last(self, rank: int) -> Item | None:
        """Return the item that a rank added last, if it is still pending."""
        queue = self._queues[rank]
        return queue[-1] if queue else None

    def resize(self, rank: int, item: Item, size: int) -> None:
        """Set the size of a pending item of the rank, in bytes."""
        self._memory[rank] += size - item.size
        item.size = size

    def peek(self, now: float, hold_s: float, *, final: bool = False) -> Choice | None:
        """Return the next item to show; None if there is none, or if other ranks may still send an equal item.

        Args:
            now: The time in seconds.
            hold_s: How long an item waits for other ranks after its arrival, in seconds.
            final: Whether not to wait for other ranks.
        """
        eligible: Iterable[int] = self._busy
        if not final and self._num_silent:
            eligible = self._overdue(now - hold_s + 1e-6)
        if (rank := self._choose(eligible)) is None:
            return None
        item = self._queues[rank][0]
        ranks = sorted(self._heads[item.key])
        return Choice(ranks, item, min(self._queues[rank][0].order for rank in ranks))

    def take(self, choice: Choice) -> None:
        """Remove the item that `peek` returned."""
        key = choice.item.key
        for rank in choice.ranks:
            item = self._queues[rank].popleft()
            self._memory[rank] -= item.size + _OVERHEAD
            keys = self._keys[rank]
            keys[key] -= 1
            if not keys[key]:
                del keys[key]
                _discard(self._holders, key, rank)
            self._set_head(rank, item)

    def _overdue(self, before: float) -> Iterator[int]:
        """Yield the ranks, sorted, whose heads have waited long enough, or that have an equal item further back.

        With these, the latter can be merged, so their own heads are due, too.
        """
        indirect: set[int] | None = None
        for rank in self._busy:
            if self._queues[rank][0].at <= before:
                yield rank
                continue
            indirect = self._indirectly_due(before) if indirect is None else indirect
            if rank in indirect:
                yield rank

    def _indirectly_due(self, before: float) -> set[int]:
        keys = {head.key for rank in self._busy if (head := self._queues[rank][0]).at <= before}
        due, todo = set[int](), list(keys)
        while todo:
            for rank in self._holders[todo.pop()] - due:
                due.add(rank)
                if (key := self._queues[rank][0].key) not in keys:
                    keys.add(key)
                    todo.append(key)
        return due

    def _choose(self, eligible: Iterable[int]) -> int | None:
        # If another rank has an equal item further back, the head waits for it; otherwise it would be shown twice.
        first = None
        for rank in eligible:
            key = self._queues[rank][0].key
            if len(self._heads[key]) == len(self._holders[key]):
                return rank
            first = rank if first is None else first
        return first


def _discard(ranks_of: dict[Hashable, set[int]], key: Hashable, rank: int) -> None:
    ranks_of[key].discard(rank)
    if not ranks_of[key]:
        del ranks_of[key]
