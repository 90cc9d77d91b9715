"""A timeline of a cluster: live while cells run and a page shows it, saved as a picture after each cell."""

from __future__ import annotations

import weakref

from IPython.core.interactiveshell import InteractiveShell

from axon_nb.cluster.cluster import Cluster
from axon_nb.widgets.panel import Panel
from axon_nb.widgets.timeline.view import TimelineView


class TimelinePanel(Panel):
    """A panel that the cluster's span feed keeps up to date.

    Args:
        cluster: The cluster whose ranks are shown.
        ranks: Rows, from the top.
    """

    def __init__(self, cluster: Cluster, ranks: list[int]) -> None:
        super().__init__()
        self._cluster = weakref.ref(cluster)
        self._feed = cluster.spans
        self._feed.collect(watch_s=5.0)
        self.view: TimelineView = TimelineView(self._feed, ranks)
        self._picture: dict[str, str] = {}
        self._picture_end = -1

    def picture(self) -> dict[str, str]:
        """Return what the view shows now; made again only if spans were added, because it reads all of them."""
        if self._feed.store.end != self._picture_end:
            self._picture_end = self._feed.store.end
            self._picture = self.view.to_bundle()
        return self._picture

    def open(self, shell: InteractiveShell) -> None:
        """Show the panel in the running cell and feed it from now on."""
        super().open(shell)
        self._feed.open(self.view)

    def close(self) -> None:
        """Stop feeding it; what is shown stays."""
        self._feed.close(self.view)
        was_open = self._shell is not None
        super().close()
        if was_open:
            self.view.finish()

    def after_cell(self) -> None:
        """Fetch the last spans, or close the panel if the cluster has stopped."""
        cluster = self._cluster()
        if cluster is not None and cluster.running:
            self._feed.collect(timeout_s=0.3)
        else:
            self.close()
