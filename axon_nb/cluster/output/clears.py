"""`clear_output` of ranks: at most one clear a flush, and no rank loses what it did not clear itself."""

from __future__ import annotations

from collections.abc import Sequence

from axon_nb.cluster.output.merge import Choice

__all__ = ["Clears"]


class Clears:
    """Remembers the ranks whose clear waits for their next output (``clear_output(wait=True)``)."""

    def __init__(self) -> None:
        self._waiting: set[int] = set()

    def apply(self, batch: Sequence[Choice]) -> tuple[set[int], bool, list[Choice]]:
        """The ranks whose clear takes effect now, whether output follows it at once, and what is left to show.

        Args:
            batch: Items in order, clears among them.
        """
        if not self._waiting and not any(item.kind == "clear" for _, item, _ in batch):
            return set(), False, list(batch)
        cleared, later, seen = set[int](), set[int](), set[int]()
        kept = []
        for ranks, item, order in reversed(batch):
            if item.kind == "clear":
                now = {rank for rank in ranks if not item.payload or rank in seen}
                cleared |= now
                later |= set(ranks) - now - seen
                continue
            seen.update(ranks)
            if left := [rank for rank in ranks if rank not in cleared]:
                kept.append(Choice(left, item, order))
        cleared |= self._waiting & seen
        self._waiting = (self._waiting - cleared) | later
        return cleared, bool(kept), kept[::-1]
