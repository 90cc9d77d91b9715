"""A view of shards that follows a cluster: asked anew while a cell runs and after each, as long as somebody looks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import DisplayHandle, display

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.layouts import ask_layouts
from axon_nb.widgets.shards import ShardsView

__all__ = ["ShardsPanel"]

_EVERY_S = 1.0
_log = logging.getLogger("axon_nb.panels")


class ShardsPanel:
    """The widget in one output, and a saved picture of it in a second one that is folded.

    Args:
        cluster: Whose ranks are asked.
        names: Variables of the ranks.
        gradients: Whether gradients are shown besides.

    Raises:
        UsageError: there is nothing of that name to show.
    """

    def __init__(self, cluster: Cluster, names: Sequence[str], *, gradients: bool = False) -> None:
        self._cluster = cluster
        self._names = list(names)
        self._gradients = gradients
        self.view = ShardsView(", ".join(names), *ask_layouts(cluster, names, gradients=gradients))
        self._cell_over = threading.Event()
        self._closed = threading.Event()
        self._saved: DisplayHandle | None = None
        self._saved_at = 0
        self._shell: InteractiveShell | None = None

    def open(self, shell: InteractiveShell) -> None:
        """Show it in the running cell, and follow the cluster from now on."""
        display(self.view)
        self._saved_at = self.view.updates
        self._saved = display(self._folded(), raw=True, display_id=True)
        self._shell = shell
        shell.events.register("post_run_cell", self._after_cell)
        threading.Thread(target=self._follow, name="axon_nb-shards", daemon=True).start()

    def close(self) -> None:
        """Follow no more; what is shown stays."""
        self._closed.set()
        if self._shell is not None:
            self._shell.events.unregister("post_run_cell", self._after_cell)
            self._shell = None

    def update(self) -> bool:
        """Ask the ranks; True when something has changed. What cannot be asked any more stays as it is."""
        try:
            return self.view.show(*ask_layouts(self._cluster, self._names, gradients=self._gradients))
        except Exception:  # a view must not disturb the cell that it shows
            _log.debug("a panel could not be updated", exc_info=True)
            return False

    def _after_cell(self, result: Any) -> None:
        if not self._cluster.running:
            self.close()
            return
        try:
            self.update()
            # What was shown while the cell ran is news to the picture, too.
            if self._saved is not None and (updates := self.view.updates) != self._saved_at:
                self._saved_at = updates
                self._saved.update(self._folded(), raw=True)
        except Exception:  # a view is never worth a cell
            _log.warning("The saved picture of a panel could not be made anew.", exc_info=True)

    def _follow(self) -> None:
        while not self._closed.wait(_EVERY_S):
            if self.view.watched and self._cluster.busy:
                self.update()

    def _folded(self) -> dict[str, str]:
        bundle = self.view.to_bundle()
        summary = "the same as a picture, which stays in the saved notebook"
        return {**bundle, "text/html": f"<details><summary>{summary}</summary>{bundle['text/html']}</details>"}
