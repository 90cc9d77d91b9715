"""`%memory`: what each rank's memory holds, measured and estimated, live while cells run; and what if.

The panel of `%memory`: a view of the ranks' memory that follows a cluster, and answers what if.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import traitlets

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.inspection.memory import MemorySnapshot, request_memory, request_plan
from axon_nb.cluster.inspection.memory_what_if import WhatIf
from axon_nb.records.memory import WhatIfState
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.memory.page import MEMORY_TITLES, memory_bundle
from axon_nb.widgets.memory.rows import MemoryRows
from axon_nb.widgets.memory.what_if import what_if_content
from axon_nb.widgets.panel import FollowingPanel
from axon_nb.widgets.view import LiveView

__all__ = ["MemoryPanel", "MemoryView"]

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

    def take(self, answers: MemorySnapshot) -> None:
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


_EVERY_S = 3.0


class MemoryPanel(FollowingPanel):
    """Asks every third second.

    Args:
        cluster: Whose ranks are asked.
        names: Modules and optimizers of the ranks, by name; empty: all that their variables hold.

    Raises:
        UsageError: there is nothing of that name.
    """

    def __init__(self, cluster: Cluster, names: Sequence[str]) -> None:
        super().__init__(cluster, every_s=_EVERY_S)
        self._names = list(names)
        answers = request_memory(cluster.state, self._names)
        self._model = answers.model
        self.what_if = WhatIf(
            lambda asked, known: request_plan(cluster.state, self._names, asked, known),
            self._answered,
            lambda: bool(cluster.busy),
        )
        # Of all variables together, or of several models, nothing can be planned.
        self.view: MemoryView = MemoryView(", ".join(names), self.what_if.request if answers.model else None)
        self._take(answers)
        self.view.refresh(unseen=True)

    def _answered(self, state: WhatIfState) -> None:
        self.view.answer(state)

    def ask(self) -> float:
        """Ask the ranks, and show what they say."""
        answers = request_memory(self._cluster.state, self._names, wait_for_estimates=False)
        self._take(answers)
        return answers.cost_s

    def cluster_is_gone(self) -> None:
        """What was asked last stays; nothing else can be."""
        self.what_if.close()

    def close(self) -> None:
        """Follow no more; what is shown stays."""
        self.what_if.close()
        super().close()

    def _take(self, answers: MemorySnapshot) -> None:
        if answers.model and answers.model != self._model:
            self._model = answers.model
            self.what_if.repeat()
        self.view.take(answers)
