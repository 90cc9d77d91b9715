"""Which of the ranks' pending items comes next, and which ranks share it."""

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
"""Memory of an item beside its text, bytes."""


@dataclass(slots=True)
class Item:
    """One line, bar or display of one rank."""

    key: Hashable
    """Equal for what is shown once when several ranks send it."""
    kind: str
    """``stdout``, ``stderr``, ``bar``, ``display`` or ``clear``."""
    payload: Any
    size: int
    """In bytes."""
    at: float
    """When it came, in seconds."""
    order: int = 0
    """Higher for what came later."""


class Choice(NamedTuple):
    """What is to be shown next."""

    ranks: list[int]
    item: Item
    order: int = 0
    """The lowest of its items on these ranks."""


class MergeQueue:
    """One queue a rank. Each rank's order is kept; equal items of several ranks come out together where that allows."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._queues: dict[int, deque[Item]] = {rank: deque() for rank in sorted(ranks)}
        self._keys: dict[int, Counter[Hashable]] = {rank: Counter() for rank in ranks}
        self._memory = dict.fromkeys(ranks, 0)
        self._open = set(ranks)

    def put(self, rank: int, item: Item) -> None:
        """Add one item: at the end, or before those of a higher order."""
        queue = self._queues[rank]
        if not queue or queue[-1].order <= item.order:
            queue.append(item)
        else:
            bisect.insort(queue, item, key=_order)
        self._keys[rank][item.key] += 1
        self._memory[rank] += item.size + _OVERHEAD

    def close(self, rank: int) -> None:
        """The rank sends no more."""
        self._open.discard(rank)

    @property
    def closed(self) -> bool:
        """Whether no rank sends any more."""
        return not self._open

    def __bool__(self) -> bool:
        return any(self._queues.values())

    def oldest(self, since: float) -> float:
        """The lowest order of what came after `since` and still waits; infinity when nothing does."""
        return min((queue[0].order for queue in self._queues.values() if queue and queue[0].at > since), default=inf)

    def memory(self, rank: int) -> int:
        """About how many bytes a rank's pending items take."""
        return self._memory[rank]

    def last(self, rank: int) -> Item | None:
        """The item that a rank added last, when it is still pending."""
        queue = self._queues[rank]
        return queue[-1] if queue else None

    def resize(self, rank: int, item: Item, size: int) -> None:
        """A pending item of the rank has another size now, in bytes."""
        self._memory[rank] += size - item.size
        item.size = size

    def peek(self, now: float, hold_s: float, *, final: bool = False) -> Choice | None:
        """What to show next; None when there is nothing, or ranks that print no less may still send the same.

        Args:
            now: The time, in seconds.
            hold_s: For how many seconds after its coming an item may wait for such ranks.
            final: Whether nothing waits.
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
        """Remove what `peek` gave."""
        key = choice.item.key
        for rank in choice.ranks:
            item = self._queues[rank].popleft()
            self._memory[rank] -= item.size + _OVERHEAD
            keys = self._keys[rank]
            keys[key] -= 1
            if not keys[key]:
                del keys[key]

    def _overdue(self, heads: Mapping[int, Item], before: float) -> Mapping[int, Item]:
        # The heads that have waited long enough, and, so that these meet their equals, what other ranks have in front
        # of the same item.
        wanted = {head.key for head in heads.values() if head.at <= before}
        if not wanted:
            return {}
        chosen: set[int] = set()
        grows = True
        while grows:
            grows = False
            for rank, head in heads.items():
                if rank not in chosen and any(key in self._keys[rank] for key in wanted):
                    chosen.add(rank)
                    grows = grows or head.key not in wanted
                    wanted.add(head.key)
        return {rank: head for rank, head in heads.items() if rank in chosen}

    def _choose(self, heads: Mapping[int, Item], eligible: Mapping[int, Item]) -> int:
        # A head that another rank still has further down waits for it, or it would be shown twice.
        for rank, head in eligible.items():
            if not any(head.key in self._keys[other] and heads[other].key != head.key for other in heads):
                return rank
        return next(iter(eligible))
