"""A timeline that follows a cluster: live while cells run and a page shows it, saved as a picture after each."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import DisplayHandle, display

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.inspection.span_feed import span_feed
from axon_nb.widgets.timeline.view import TimelineView

__all__ = ["TimelinePanel"]

_log = logging.getLogger(__name__)


class TimelinePanel:
    """The widget in one output, and a saved picture of it in a second one that is folded.

    Args:
        cluster: Whose ranks are shown.
        ranks: Rows, from the top.
    """

    def __init__(self, cluster: Cluster, ranks: list[int]) -> None:
        self._cluster = weakref.ref(cluster)
        self._feed = span_feed(cluster.state)
        self._feed.collect(watch_s=5.0)
        self.view = TimelineView(self._feed, ranks)
        self._saved: DisplayHandle | None = None
        self._saved_at = -1
        self._shell: InteractiveShell | None = None

    def open(self, shell: InteractiveShell) -> None:
        """Show it in the running cell, and follow the cluster from now on."""
        display(self.view)
        self._saved_at = self._feed.store.end
        self._saved = display(self._folded(), raw=True, display_id=True)
        self._shell = shell
        shell.events.register("post_run_cell", self._after_cell)
        self._feed.open(self.view)

    def close(self) -> None:
        """Follow no more; what is shown stays."""
        self._feed.close(self.view)
        if self._shell is not None:
            self._shell.events.unregister("post_run_cell", self._after_cell)
            self._shell = None
            self.view.finish()

    def _after_cell(self, result: Any) -> None:
        cluster = self._cluster()
        running = cluster is not None and cluster.running
        try:
            if running:
                self._feed.collect(timeout_s=0.3)
            if self._saved is not None and self._feed.store.end != self._saved_at:
                self._saved_at = self._feed.store.end
                self._saved.update(self._folded(), raw=True)
        except Exception:  # a view is never worth a cell
            _log.warning("The saved picture of a timeline could not be made anew.", exc_info=True)
        if not running:
            self.close()

    def _folded(self) -> dict[str, str]:
        bundle = self.view.to_bundle()
        summary = "the same as a picture, which stays in the saved notebook"
        return {**bundle, "text/html": f"<details><summary>{summary}</summary>{bundle['text/html']}</details>"}
