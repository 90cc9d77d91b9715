"""`%memory`: each rank's memory, measured and estimated, live while cells run; and what-if scenarios."""

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
from axon_nb.widgets.memory.bars import Bar
from axon_nb.widgets.memory.page import memory_bundle
from axon_nb.widgets.memory.rows import Cell, MemoryRow, MemoryRows
from axon_nb.widgets.memory.summary import figures, notice
from axon_nb.widgets.memory.what_if import what_if_content
from axon_nb.widgets.panel import LivePanel
from axon_nb.widgets.view import LiveView

_MAX_RANKS = 64
_MIN_INTERVAL_S = 3.0


class MemoryView(LiveView):
    """Stacked bars, one per rank, and a what-if scenario below them.

    Args:
        title: What is shown, such as ``model``; empty: all variables.
        request_plan: Called, on any thread, with the page's scenario: the fields of `MemorySetup` that differ from the
            current setup, or None for the current one. None: the view offers no scenarios.
    """

    _esm = script("memory")
    _css = style("memory")

    what_if = traitlets.Dict().tag(sync=True)
    """The scenario and its prediction; empty: the view offers no scenarios."""

    def __init__(self, title: str, request_plan: Callable[[Mapping[str, Any] | None], object] | None = None) -> None:
        self._rows = MemoryRows(title)
        self._state = WhatIfState()
        self._request_plan = request_plan
        super().__init__()
        if request_plan is not None:
            self.what_if = what_if_content(self._state, None)
        view_ref = weakref.ref(self)
        self.on_msg(lambda _, message, buffers: _on_what_if(view_ref, message))

    def show(self, replies: MemorySnapshot) -> None:
        """Show the ranks' replies; from any thread."""
        with self._lock:
            self._rows.update(replies)
        self.refresh()

    def show_what_if(self, state: WhatIfState) -> None:
        """Show the scenario's progress or prediction; from any thread."""
        with self._lock:
            self._state = state
            has_changed = self._rows.set_simulation(state.reference if state.is_trained_so else None)
            content = what_if_content(state, self._rows.capacity)
        self.what_if = content
        if has_changed:
            self.refresh()

    def to_bundle(self) -> dict[str, str]:
        """Return what is shown now as `text/html` and `text/plain`, which need neither a kernel nor scripts."""
        with self._lock:
            return memory_bundle(self._rows, self._state)

    def make_content(self) -> dict[str, Any]:
        """Return the bars; their lengths are shares of the scale."""
        rows = self._rows.rows()
        num_omitted = len(rows) - _MAX_RANKS
        omitted = [f"{num_omitted} more ranks are left out."] if num_omitted > 0 else []
        return {
            "heading": self._rows.heading,
            "context": self._rows.context,
            "figures": figures(self._rows),
            "notice": notice(self._rows),
            "roles": self._rows.roles,
            "ticks": [asdict(tick) for tick in self._rows.scale.ticks],
            "columns": self._rows.columns,
            "unit": self._rows.scale.unit,
            "rows": [_row(row) for row in rows[:_MAX_RANKS]],
            "notes": [*self._rows.notes(flags=False), *omitted],
        }


def _row(row: MemoryRow) -> dict[str, Any]:
    """Return a row without what is empty, which is most of many ranks."""
    return {
        **asdict(row),
        "measured": _bar(row.measured),
        "estimated": row.estimated and _bar(row.estimated),
        "process": {"text": row.process.text},
        "cells": [
            cell.text if cell == Cell(cell.text) else {name: value for name, value in asdict(cell).items() if value}
            for cell in row.cells
        ],
    }


def _bar(bar: Bar) -> dict[str, Any]:
    marks = {
        "segments": [(role, round(share, 4)) for role, share in bar.segments],
        "peak": bar.peak and round(bar.peak, 4),
        "capacity": bar.capacity,
        "text": bar.text,
        "labels": bar.labels,
    }
    return {name: value for name, value in marks.items() if value}


def _on_what_if(view_ref: weakref.ref[MemoryView], message: dict[str, Any]) -> None:
    view = view_ref()
    if view is not None and message.get("op") == "what_if" and view._request_plan is not None:
        setup = message.get("setup")
        view._request_plan(setup if isinstance(setup, dict) else None)


class MemoryPanel(LivePanel):
    """A panel that polls at most every three seconds.

    Args:
        cluster: The cluster whose ranks are polled.
        names: Modules and optimizers of the ranks, by name; empty: all that their variables hold.

    Raises:
        UsageError: No rank has a module or optimizer of that name.
    """

    def __init__(self, cluster: Cluster, names: Sequence[str]) -> None:
        super().__init__(cluster, min_interval_s=_MIN_INTERVAL_S)
        self._names = list(names)
        replies = request_memory(cluster.state, self._names)
        self._model = replies.model
        self.what_if = WhatIf(
            lambda asked, known: request_plan(cluster.state, self._names, asked, known),
            self._show_what_if,
            lambda: bool(cluster.busy),
        )
        # Only a single model can be planned.
        self.view: MemoryView = MemoryView(", ".join(names), self.what_if.request if replies.model else None)
        self._show(replies)
        self.view.refresh(unseen=True)

    def poll(self) -> float:
        """Query the ranks and show their replies."""
        replies = request_memory(self._cluster.state, self._names, wait_for_estimates=False)
        self._show(replies)
        return replies.cost_s

    def on_cluster_stopped(self) -> None:
        """Accept no more scenarios; the last replies stay."""
        self.what_if.close()

    def close(self) -> None:
        """Stop polling; what is shown stays."""
        self.what_if.close()
        super().close()

    def _show(self, replies: MemorySnapshot) -> None:
        if replies.model and replies.model != self._model:
            self._model = replies.model
            self.what_if.repeat()
        self.view.show(replies)

    def _show_what_if(self, state: WhatIfState) -> None:
        self.view.show_what_if(state)
