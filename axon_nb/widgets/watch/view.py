"""`%watch`: one panel for a running job, live while cells run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.inspection.job import JobSnapshot, request_job
from axon_nb.records.colors import RANKS
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.palette import SERIES_TOKENS
from axon_nb.widgets.panel import LivePanel
from axon_nb.widgets.view import LiveView
from axon_nb.widgets.watch.page import (
    FORMATS,
    RANK_TITLES,
    context,
    heading,
    rank_cells,
    series_text,
    series_value,
    shown_series,
    watch_bundle,
)
from axon_nb.widgets.watch.series import Series, pack_points
from axon_nb.widgets.watch.store import JobStore, RankRow

_MAX_RANKS = 64
_MIN_INTERVAL_S = 2.0
_MAX_REQUESTS = 8


class WatchView(LiveView):
    """Curves, loops and states of a job, and a button that interrupts its cell.

    Args:
        stop: Called, on any thread, when the button is clicked.
    """

    _esm = script("watch")
    _css = style("watch")

    def __init__(self, stop: Callable[[], object]) -> None:
        self._store = JobStore()
        self._stop = stop
        super().__init__()

    @property
    def store(self) -> JobStore:
        """What is known of the job; read-only."""
        return self._store

    def add(self, replies: Sequence[JobSnapshot], now: float) -> None:
        """Show the ranks' replies, too; from any thread. `now` is in seconds of any clock."""
        with self._lock:
            for reply in replies:
                self._store.add(reply, now)
        self.refresh()

    def stop(self) -> None:
        """Show that the cluster has stopped; from any thread."""
        with self._lock:
            self._store.stop()
        self.refresh()

    def to_bundle(self) -> dict[str, str]:
        """Return what is shown now as `text/html` and `text/plain`, which need neither a kernel nor scripts."""
        with self._lock:
            return watch_bundle(self._store)

    def on_op(self, op: str) -> None:
        """Handle a click on the button."""
        if op == "stop":
            self._stop()

    def make_content(self) -> dict[str, Any]:
        """Return curves with their points as bytes, loops, and the table of ranks."""
        store = self._store
        rows = store.rows()
        num_omitted = len(rows) - _MAX_RANKS
        omitted = [f"{num_omitted} more ranks are left out of the table."] if num_omitted > 0 else []
        most_memory = max((row.memory for row in rows), default=0) or 1
        charts = [
            _chart(series, number, measured=measured) for number, (series, measured) in enumerate(shown_series(store))
        ]
        return {
            "heading": heading(store),
            "context": context(store),
            "running": store.cell is not None,
            "bars": [asdict(bar) for bar in store.bars()],
            "charts": charts,
            "titles": list(RANK_TITLES),
            "ranks": [_row(row, most_memory) for row in rows[:_MAX_RANKS]],
            "notes": [*store.notes(), *omitted],
        }


def _row(row: RankRow, most_memory: int) -> dict[str, Any]:
    cells: list[dict[str, Any]] = [{"text": text} for text in rank_cells(row)]
    if row.communication is not None:
        cells[-2] |= {"share": round(row.communication, 3), "token": "kind-collective"}
    if row.memory:
        cells[-1] |= {"share": round(row.memory / most_memory, 3), "token": "kind-p2p"}
    return {"rank": row.rank, "cells": cells}


def _chart(series: Series, number: int, *, measured: bool) -> dict[str, Any]:
    value, spread = series_value(series, measured=measured)
    color = SERIES_TOKENS[series.name] if measured else f"rank-{number % len(RANKS)}"
    return {
        "name": series.name,
        "value": value,
        "spread": spread,
        "text": series_text(series, measured=measured),
        "token": color,
        "kind": FORMATS[series.name][0] if measured else "number",
        "axis": "seconds" if measured else "steps",
        "points": pack_points(series.points()),
    }


class WatchPanel(LivePanel):
    """A panel that polls at most every two seconds.

    Args:
        cluster: The cluster whose job is shown.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, min_interval_s=_MIN_INTERVAL_S)
        self.view: WatchView = WatchView(cluster.cancel)
        self.poll()
        self.view.refresh(unseen=True)

    def poll(self) -> float:
        """Read everything that was logged so far."""
        replies = read_job(self._cluster, self.view)
        self.view.add(replies, time.monotonic())
        return sum(reply.cost_s for reply in replies)

    def on_cluster_stopped(self) -> None:
        """Show that no cell runs anymore; the ranks' last states stay."""
        self.view.stop()


def read_job(cluster: Cluster, view: WatchView) -> list[JobSnapshot]:
    """Return what the ranks have logged since the view's last update, in as many requests as it takes."""
    known, replies = dict(view.store.reports), []
    for _ in range(_MAX_REQUESTS):
        replies.append(request_job(cluster.state, known))
        known.update(replies[-1].reports)
        if all(report.is_last for report in replies[-1].reports.values()):
            break
    return replies
