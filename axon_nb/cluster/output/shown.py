"""What a cell has shown, so that a rank's `clear_output` removes only what that rank has shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from axon_nb.cluster.output.displays import Bundle
from axon_nb.cluster.output.merge import Choice, Item

_MAX_BYTES = 2 << 20
_NOTE = "… earlier output is not shown again …"


@dataclass(slots=True)
class _Entry:
    choice: Choice
    position: float
    """Entries are shown in this order, then in that of their arrival."""


class ShownOutput:
    """Holds the output of a cell since the last complete clear; of more than 2 MiB, only the end."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._size = 0
        self._omitted: set[int] = set()
        """The ranks whose first output is no longer held."""
        self._positions: dict[int, float] = {}
        """By rank, where the output begins that replaces what the rank cleared."""

    def add(self, batch: Iterable[Choice]) -> None:
        """Record output that is shown below all other."""
        for choice in batch:
            if choice.item.kind != "bar" and not self._update(choice.item):
                self._entries.append(_Entry(choice, choice.order))
                self._size += choice.item.size
                for rank in choice.ranks:
                    self._positions.setdefault(rank, choice.order)
        while self._size > _MAX_BYTES and self._entries:
            first = self._entries.pop(0).choice
            self._size -= first.item.size
            self._omitted.update(first.ranks)

    def _update(self, item: Item) -> bool:
        """Apply an update of a display; return whether it is one."""
        update = item.payload if item.kind == "display" else None
        if not isinstance(update, Bundle) or not update.update:
            return False
        for entry in self._entries:
            shown = entry.choice.item
            if shown.kind == "display" and shown.payload.display_id == update.display_id:
                self._size += item.size - shown.size
                shown.payload, shown.size = update._replace(update=False), item.size
        return True

    def includes(self, ranks: set[int]) -> bool:
        """Whether one of the ranks has shown something."""
        return any(rank in ranks for entry in self._entries for rank in entry.choice.ranks)

    def clear(self, cleared: set[int], batch: Sequence[Choice]) -> list[Choice]:
        """Remove what the ranks `cleared` have shown, and add what they show instead, where that was.

        Returns:
            All that is to be shown again, in order.
        """
        remaining = []
        for entry in self._entries:
            ranks, item, order = entry.choice
            if left := [rank for rank in ranks if rank not in cleared]:
                remaining.append(_Entry(Choice(left, item, order), entry.position))
        for choice in batch:
            if self._update(choice.item):
                continue
            begins = [self._positions[rank] for rank in choice.ranks if rank in cleared and rank in self._positions]
            remaining.append(_Entry(choice, min(begins, default=choice.order)))
        self._omitted -= cleared
        remaining.sort(key=lambda entry: (entry.position, entry.choice.order))
        shown = [entry.choice for entry in remaining]
        self._entries = [entry for entry in remaining if entry.choice.item.kind != "bar"]
        self._size = sum(entry.choice.item.size for entry in self._entries)
        if self._omitted:
            note = Item(("stdout", _NOTE), "stdout", _NOTE, len(_NOTE), 0.0)
            shown.insert(0, Choice(sorted(self._omitted), note, 0))
        return shown
