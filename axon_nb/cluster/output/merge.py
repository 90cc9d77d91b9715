"""Merges the ranks' pending output: chooses the next item, and the ranks that share it."""

from __future__ import annotations

import bisect
import operator
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

__all__ = ["Choice", "Item", "MergeQueue"]

_order = operator.attrgetter("order")
_OVERHEAD = 350
"""Memory of an item in addition to its text, in bytes."""


@dataclass(slots=True)
class Item:
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
    """One queue per rank. Each rank's order is preserved; if it permits, equal items of several ranks are merged."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._queues: dict[int, deque[Item]] = {rank: deque() for rank in sorted(ranks)}
        self._keys: dict[int, Counter[Hashable]] = {rank: Counter() for rank in ranks}
        self._memory = dict.fromkeys(ranks, 0)
        self._open = set(ranks)

    def put(self, rank: int, item: Item) -> None:
        """Add an item at the end, or before items with a higher order."""
        queue = self._queues[rank]
        if not queue or queue[-1].order <= item.order:
            queue.append(item)
        else:
            bisect.insort(queue, item, key=_order)
        self._keys[rank][item.key] += 1
        self._memory[rank] += item.size + _OVERHEAD

    def close(self, rank: int) -> None:
        """Record that the rank sends nothing more."""
        self._open.discard(rank)

    @property
    def closed(self) -> bool:
        """Whether all ranks are closed."""
        return not self._open

    def __bool__(self) -> bool:
        return any(self._queues.values())

    def oldest(self, since: float) -> float:
        """Return the lowest order of the pending items that arrived after `since`; infinity if there are none."""
        return min((queue[0].order for queue in self._queues.values() if queue and queue[0].at > since), default=inf)

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
        heads = {rank: queue[0] for rank, queue in self._queues.items() if queue}
        eligible: Mapping[int, Item] = heads
        if not final and any(rank not in heads for rank in self._open):
            eligible = self._overdue(heads, now - hold_s + 1e-6)
        if not eligible:
            return None
        item = heads[self._choose(heads, eligible)]
        ranks = [rank for rank, head in heads.items() if head.key == item.key]
        return Choice(ranks, item, min(heads[rank].order for rank in ranks))

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

    def _overdue(self, heads: Mapping[int, Item], before: float) -> Mapping[int, Item]:
        # The heads that have waited long enough. So that they can be merged with equal items, the heads of ranks that
        # have such an item further back are due, too.
        due_keys = {head.key for head in heads.values() if head.at <= before}
        if not due_keys:
            return {}
        overdue: set[int] = set()
        grows = True
        while grows:
            grows = False
            for rank, head in heads.items():
                if rank not in overdue and any(key in self._keys[rank] for key in due_keys):
                    overdue.add(rank)
                    grows = grows or head.key not in due_keys
                    due_keys.add(head.key)
        return {rank: head for rank, head in heads.items() if rank in overdue}

    def _choose(self, heads: Mapping[int, Item], eligible: Mapping[int, Item]) -> int:
        # If another rank has an equal item further back, the head waits for it; otherwise it would be shown twice.
        for rank, head in eligible.items():
            if not any(head.key in self._keys[other] and heads[other].key != head.key for other in heads):
                return rank
        return next(iter(eligible))
