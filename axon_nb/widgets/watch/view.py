"""`%watch`: one panel for a running job, live while cells run.

The panel of `%watch`: a view of the job that follows a cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.inspection.job import JobSnapshot, request_job
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.panel import FollowingPanel
from axon_nb.widgets.view import LiveView
from axon_nb.widgets.watch.page import (
    FORMATS,
    RANK_TITLES,
    heading,
    rank_cells,
    series_words,
    shown_series,
    watch_bundle,
)
from axon_nb.widgets.watch.series import Series, pack_points
from axon_nb.widgets.watch.store import JobStore

__all__ = ["WatchPanel", "WatchView", "ask_all"]

_MAX_RANKS = 64


class WatchView(LiveView):
    """Curves, loops and states of a job, and a button that ends its cell.

    Args:
        stop: Called, on any thread, when the button is pressed.
    """

    _esm = script("watch")
    _css = style("watch")

    def __init__(self, stop: Callable[[], object]) -> None:
        self._store = JobStore()
        self._stop = stop
        super().__init__()

    @property
    def store(self) -> JobStore:
        """What is known of the job; only to be read."""
        return self._store

    def take(self, answers: Sequence[JobSnapshot], now: float) -> None:
        """Take in what the ranks have said, at `now` in seconds of any clock, and show it; from any thread."""
        with self._lock:
            for answer in answers:
                self._store.take(answer, now)
        self.refresh()

    def to_bundle(self) -> dict[str, str]:
        """What is shown now as `text/html` and `text/plain`, which need neither a kernel nor scripts."""
        with self._lock:
            return watch_bundle(self._store)

    def on_op(self, op: str) -> None:
        """The button was pressed."""
        if op == "stop":
            self._stop()

    def make_content(self) -> dict[str, Any]:
        """Curves with their points as bytes, loops, and the table of ranks."""
        store = self._store
        rows = store.rows()
        more = len(rows) - _MAX_RANKS
        notes = [*store.notes(), *([f"{more} more ranks are left out of the table."] if more > 0 else [])]
        return {
            "heading": heading(store),
            "running": store.cell is not None,
            "bars": [asdict(bar) for bar in store.bars()],
            "charts": [_chart(series, measured=measured) for series, measured in shown_series(store)],
            "titles": list(RANK_TITLES),
            "ranks": [[str(row.rank), *rank_cells(row)] for row in rows[:_MAX_RANKS]],
            "notes": notes,
        }


def _chart(series: Series, *, measured: bool) -> dict[str, Any]:
    return {
        "name": series.name,
        "words": series_words(series, measured=measured),
        "kind": FORMATS[series.name][0] if measured else "number",
        "along": "s" if measured else "step",
        "points": pack_points(series.points()),
    }


_EVERY_S = 2.0
_MAX_ROUNDS = 8


class WatchPanel(FollowingPanel):
    """Asks every other second.

    Args:
        cluster: Whose job is shown.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, every_s=_EVERY_S)
        self.view: WatchView = WatchView(cluster.cancel)
        self.ask()
        self.view.refresh(unseen=True)

    def ask(self) -> float:
        """Ask until everything is read that was logged so far."""
        answers = ask_all(self._cluster, self.view)
        self.view.take(answers, time.monotonic())
        return sum(answer.cost_s for answer in answers)

    def cluster_is_gone(self) -> None:
        """No cell runs any more, whatever was told last."""
        self.view.take([JobSnapshot({}, dict.fromkeys(self._cluster.ranks, "gone"), None)], time.monotonic())


def ask_all(cluster: Cluster, view: WatchView) -> list[JobSnapshot]:
    """What the ranks have logged since the view was fed last, in as many questions as it takes."""
    known, answers = dict(view.store.reports), []
    for _ in range(_MAX_ROUNDS):
        answers.append(request_job(cluster.state, known))
        known.update(answers[-1].reports)
        if all(report.is_last for report in answers[-1].reports.values()):
            break
    return answers
