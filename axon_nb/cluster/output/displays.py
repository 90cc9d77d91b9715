"""Displays and `clear_output` calls of ranks.

Displays are mime bundles that are cheap to compare; display ids are made unique per rank. There is at most one clear
per flush, and no rank loses output that it did not clear itself. Widgets of ranks have no model in the notebook: their
text is shown instead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from axon_nb.cluster.output.merge import Choice
from axon_nb.cluster.output.rows import close_colours, strip_control
from axon_nb.cluster.output.sinks import valid_text

_WIDGET = "application/vnd.jupyter.widget-view+json"
_WIDGET_NOTE = "(a widget of a rank: its text)"


class Bundle(NamedTuple):
    """One display, or an update of one."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str | None
    """The target of later updates; unique to the rank."""
    update: bool

    @property
    def text(self) -> str | None:
        """The text of a display that consists of text only and cannot be updated; else None."""
        if self.update or self.display_id or set(self.data) != {"text/plain"}:
            return None
        text = self.data["text/plain"]
        return close_colours(strip_control(valid_text("".join(text) if isinstance(text, list) else text)))

    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for displays that look the same; displays with an id are never equal."""
        if self.display_id or self.update:
            return ("display", self.display_id, self.update)
        values = ((mime, value if isinstance(value, str) else _json(value)) for mime, value in self.data.items())
        return ("display", _json(self.metadata), *sorted(values))

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        return sum(len(value if isinstance(value, str) else _json(value)) for value in self.data.values())


def read_bundle(rank: int, msg_type: str, content: dict[str, Any]) -> Bundle | None:
    """Read the display in a rank's message; None if there is none."""
    data = content.get("data")
    if not isinstance(data, dict) or (not data and msg_type != "update_display_data"):
        return None
    if _WIDGET in data:
        data = {mime: value for mime, value in data.items() if mime not in (_WIDGET, "text/html")}
        data["text/plain"] = f"{data.get('text/plain', 'a widget')} {_WIDGET_NOTE}"
    own_id = (content.get("transient") or {}).get("display_id")
    display_id = f"{own_id}-rank{rank}" if own_id else None
    update = msg_type == "update_display_data"
    return None if update and not display_id else Bundle(data, content.get("metadata") or {}, display_id, update)


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


class PendingClears:
    """Tracks the ranks whose clear waits for their next output (``clear_output(wait=True)``)."""

    def __init__(self) -> None:
        self._waiting: set[int] = set()

    def apply(self, batch: Sequence[Choice]) -> tuple[set[int], list[Choice]]:
        """Apply the clears in a batch.

        Args:
            batch: Items in order, including clears.

        Returns:
            The ranks whose clear takes effect now, and the items left to show.
        """
        if not self._waiting and not any(item.kind == "clear" for _, item, _ in batch):
            return set(), list(batch)
        cleared, deferred, seen = set[int](), set[int](), set[int]()
        remaining = []
        for ranks, item, order in reversed(batch):
            if item.kind == "clear":
                now = {rank for rank in ranks if not item.payload or rank in seen}
                cleared |= now
                deferred |= set(ranks) - now - seen
                continue
            seen.update(ranks)
            if not_cleared := [rank for rank in ranks if rank not in cleared]:
                remaining.append(Choice(not_cleared, item, order))
        cleared |= self._waiting & seen
        self._waiting = (self._waiting - cleared) | deferred
        return cleared, remaining[::-1]
