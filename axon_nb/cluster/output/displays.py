"""What ranks display: mime bundles, compared cheaply, with an identity of their own on every rank.

`clear_output` of ranks: at most one clear a flush, and no rank loses what it did not clear itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from axon_nb.cluster.output.merge import Choice
from axon_nb.cluster.output.rows import close_colours, without_control
from axon_nb.cluster.output.sinks import valid_text

__all__ = ["Bundle", "Clears", "read_bundle"]


class Bundle(NamedTuple):
    """One display."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str | None
    """Where later updates go; unique to the rank."""
    update: bool

    @property
    def text(self) -> str | None:
        """The text, when there is nothing else to the display."""
        if self.update or self.display_id or set(self.data) != {"text/plain"}:
            return None
        text = self.data["text/plain"]
        return close_colours(without_control(valid_text("".join(text) if isinstance(text, list) else text)))

    def key(self) -> tuple[object, ...]:
        """Equal for displays that look the same; updates, and what can be updated, stay apart."""
        if self.display_id or self.update:
            return ("display", self.display_id, self.update)
        values = ((mime, value if isinstance(value, str) else _json(value)) for mime, value in self.data.items())
        return ("display", _json(self.metadata), *sorted(values))

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        return sum(len(value if isinstance(value, str) else _json(value)) for value in self.data.values())


def read_bundle(rank: int, msg_type: str, content: dict[str, Any]) -> Bundle | None:
    """The display that a message of a rank holds; None when it holds none."""
    data = content.get("data")
    if not isinstance(data, dict) or (not data and msg_type != "update_display_data"):
        return None
    own_id = (content.get("transient") or {}).get("display_id")
    display_id = f"{own_id}-rank{rank}" if own_id else None
    update = msg_type == "update_display_data"
    return None if update and not display_id else Bundle(data, content.get("metadata") or {}, display_id, update)


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


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
