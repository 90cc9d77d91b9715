"""`%watch`: one panel for a running job, live while cells run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from axon_nb.cluster.job import JobAnswers
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.job_store import JobStore
from axon_nb.widgets.job_words import FORMATS, heading, rank_cells, series_words
from axon_nb.widgets.live_view import LiveView
from axon_nb.widgets.series import Series, pack_points
from axon_nb.widgets.watch_page import RANK_TITLES, shown_series, watch_bundle

__all__ = ["WatchView"]

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

    def take(self, answers: Sequence[JobAnswers], now: float) -> None:
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
