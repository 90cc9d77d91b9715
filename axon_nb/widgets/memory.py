"""`%memory`: what each rank's memory holds, measured and estimated, live while cells run; and what if."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import traitlets

from axon_nb.cluster.memory import MemoryAnswers
from axon_nb.records.what_if import WhatIfState
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.live_view import LiveView
from axon_nb.widgets.memory_page import MEMORY_TITLES, memory_bundle
from axon_nb.widgets.memory_rows import MemoryRows
from axon_nb.widgets.memory_what_if import what_if_content

__all__ = ["MemoryView"]

_MAX_RANKS = 64


class MemoryView(LiveView):
    """Stacked bars, one a rank, and below them questions of what they would be otherwise.

    Args:
        title: What is shown, such as ``model``; empty: all variables.
        ask: Called, on any thread, with what a page asks: fields of `MemorySetup` that differ from what is, or None;
            None: nothing can be asked.
    """

    _esm = script("memory")
    _css = style("memory")

    what_if = traitlets.Dict().tag(sync=True)
    """The question and its answer; empty: nothing can be asked."""

    def __init__(self, title: str, ask: Callable[[Mapping[str, Any] | None], object] | None = None) -> None:
        self._rows = MemoryRows(title)
        self._state = WhatIfState()
        self._ask = ask
        super().__init__()
        if ask is not None:
            self.what_if = what_if_content(self._state, None)
        me = weakref.ref(self)
        self.on_msg(lambda _, message, buffers: _asked(me, message))

    def take(self, answers: MemoryAnswers) -> None:
        """Show what the ranks have said; from any thread."""
        with self._lock:
            self._rows.take(answers)
        self.refresh()

    def answer(self, state: WhatIfState) -> None:
        """Show how far the question is; from any thread."""
        with self._lock:
            self._state = state
            reference = state.reference if state.is_trained_so else None
            is_other = self._rows.expect(reference)
            content = what_if_content(state, self._rows.capacity)
        self.what_if = content
        if is_other:
            self.refresh()

    def to_bundle(self) -> dict[str, str]:
        """What is shown now as `text/html` and `text/plain`, which need neither a kernel nor scripts."""
        with self._lock:
            return memory_bundle(self._rows, self._state)

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


def _asked(me: weakref.ref[MemoryView], message: dict[str, Any]) -> None:
    view = me()
    if view is not None and message.get("op") == "what_if" and view._ask is not None:
        setup = message.get("setup")
        view._ask(setup if isinstance(setup, dict) else None)
