"""What ranks, their threads and child processes print while no cell runs; the next cell shows it first."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from axon_nb.cluster.output.cell_output import CellOutput
from axon_nb.cluster.output.sinks import Sink, StreamName

_HEAD = "Since the last cell:\n"
_INDENT = "  "
_SHOWN = ("stream", "display_data", "update_display_data")


class BetweenCells:
    """Holds output between cells, at most as much as one cell may show.

    Args:
        ranks: All ranks.
        limit_bytes: Maximum number of bytes of text to hold.
    """

    def __init__(self, ranks: Sequence[int], *, limit_bytes: int) -> None:
        self._ranks = list(ranks)
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._sink = _DelegatingSink()
        self._pending: CellOutput | None = None

    def feed(self, rank: int, msg_type: str, content: dict[str, Any]) -> None:
        """Hold one message of a rank; called from the client's IO thread."""
        if msg_type not in _SHOWN:
            return
        with self._lock:
            if self._pending is None:
                self._pending = CellOutput(self._ranks, self._sink, limit_bytes=self._limit)
            self._pending.feed(rank, msg_type, content, {})

    def show(self, sink: Sink) -> None:
        """Show what is held, labelled as earlier than the cell that is about to run; on the notebook's thread."""
        with self._lock:
            pending, self._pending = self._pending, None
        if pending is not None:
            self._sink.target, self._sink.has_head = sink, False
            pending.flush(final=True)


class _DelegatingSink:
    """Shows a head and indented text in a sink that is only known when there is a cell."""

    target: Sink
    has_head = False
    in_place = True

    def stream(self, name: StreamName, text: str) -> None:
        self._show_head(name)
        self.target.stream(name, "".join(_INDENT + line for line in text.splitlines(keepends=True)))

    def display(self, data: dict[str, Any], metadata: dict[str, Any], *, display_id: str | None, update: bool) -> None:
        self._show_head("stdout")
        self.target.display(data, metadata, display_id=display_id, update=update)

    def clear(self, *, wait: bool) -> None:
        """Nothing: what other cells have shown stays."""

    def _show_head(self, name: StreamName) -> None:
        if not self.has_head:
            self.has_head = True
            self.target.stream(name, _HEAD)
