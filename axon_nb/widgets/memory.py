"""`%memory`: what each rank's memory holds, measured and estimated, live while cells run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from axon_nb.cluster.memory import MemoryAnswers
from axon_nb.widgets.live_view import STATIC, LiveView
from axon_nb.widgets.memory_page import MEMORY_TITLES, memory_bundle
from axon_nb.widgets.memory_rows import MemoryRows

__all__ = ["MemoryView"]

_MAX_RANKS = 64


class MemoryView(LiveView):
    """Stacked bars, one a rank.

    Args:
        title: What is shown, such as ``model``; empty: all variables.
    """

    _esm = STATIC / "memory.js"
    _css = STATIC / "memory.css"

    def __init__(self, title: str) -> None:
        self._rows = MemoryRows(title)
        super().__init__()

    def take(self, answers: MemoryAnswers) -> None:
        """Show what the ranks have said; from any thread."""
        with self._lock:
            self._rows.take(answers)
        self.refresh()

    def to_bundle(self) -> dict[str, str]:
        """What is shown now as `text/html` and `text/plain`, which need neither a kernel nor scripts."""
        with self._lock:
            return memory_bundle(self._rows)

    def make_content(self) -> dict[str, Any]:
        """Lengths of bars as parts of the scale."""
        rows = self._rows.rows()
        more = len(rows) - _MAX_RANKS
        notes = [*self._rows.notes(), *([f"{more} more ranks are left out."] if more > 0 else [])]
        return {
            "heading": self._rows.heading,
            "roles": self._rows.roles,
            "titles": list(MEMORY_TITLES),
            "rows": [asdict(row) for row in rows[:_MAX_RANKS]],
            "notes": notes,
        }
