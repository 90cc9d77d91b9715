"""Which of the ranks' pending items comes next, and which ranks share it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Item", "MergeQueue"]


@dataclass(slots=True)
class Item:
    """One line or display of one rank."""

    key: Hashable
    """Equal for what is shown once when several ranks send it."""
    kind: str
    """``stdout``, ``stderr``, ``display`` or ``clear``."""
    payload: Any
    size: int
    """In bytes."""
    at: float
    """When it came."""


class MergeQueue:
    """One queue a rank. Each rank's order is kept; equal items of several ranks come out together where that allows."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._queues: dict[int, deque[Item]] = {rank: deque() for rank in ranks}
        self._keys: dict[int, Counter[Hashable]] = {rank: Counter() for rank in ranks}
        self._open = set(ranks)

    def put(self, rank: int, item: Item) -> None:
        """Add one item."""
        self._queues[rank].append(item)
        self._keys[rank][item.key] += 1

    def close(self, rank: int) -> None:
        """The rank sends no more."""
        self._open.discard(rank)

    def __bool__(self) -> bool:
        return any(self._queues.values())

    def head_at(self) -> float | None:
        """When the oldest pending item came."""
        return min((queue[0].at for queue in self._queues.values() if queue), default=None)

    def next(self, now: float, hold_s: float, may_go: Callable[[Item], bool]) -> tuple[list[int], Item] | None:
        """The ranks and the item to show next; None when there is none, it may still be shared, or it may not go yet.

        Args:
            now: The time.
            hold_s: For how many seconds after its coming an item waits for ranks that may send the same.
            may_go: Asked last; when it says no the item stays.
        """
        heads = {rank: queue[0] for rank, queue in self._queues.items() if queue}
        if not heads:
            return None
        rank = self._choose(heads)
        item = heads[rank]
        ranks = [other for other, head in heads.items() if head.key == item.key]
        may_follow = any(other in self._open and other not in heads for other in self._queues)
        if may_follow and len(self._queues) > 1 and now - min(heads[r].at for r in ranks) < hold_s:
            return None
        if not may_go(item):
            return None
        for other in ranks:
            self._queues[other].popleft()
            keys = self._keys[other]
            keys[item.key] -= 1
            if not keys[item.key]:
                del keys[item.key]
        return ranks, item

    def _choose(self, heads: dict[int, Item]) -> int:
        # A head that another rank still has further down waits for it, or it would be shown twice.
        for rank, head in heads.items():
            later = any(
                other != rank and heads[other].key != head.key and head.key in self._keys[other] for other in heads
            )
            if not later:
                return rank
        return next(iter(heads))
