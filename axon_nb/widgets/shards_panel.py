"""A view of shards that follows a cluster: asked anew while a cell runs and after each, as long as somebody looks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import DisplayHandle, display

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.layouts import LayoutQuestion
from axon_nb.cluster.pace import Pace
from axon_nb.widgets.shards import ShardsView

__all__ = ["ShardsPanel"]

_EVERY_S = 2.0
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
        self._question = LayoutQuestion(cluster.state, names, gradients=gradients)
        self.view = ShardsView(", ".join(names), *self._question.ask())
        self._asking = threading.Lock()
        self._pace = Pace(_EVERY_S)
        self._is_stale = False
        """Whether the saved picture is older than what is shown."""
        self._closed = threading.Event()
        self._saved: DisplayHandle | None = None
        self._shell: InteractiveShell | None = None

    def open(self, shell: InteractiveShell) -> None:
        """Show it in the running cell, and follow the cluster from now on."""
        display(self.view)
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

    def update(self) -> None:
        """Ask the ranks. What cannot be asked any more stays as it is."""
        try:
            with self._asking:
                began = time.thread_time()
                told = self._question.ask()
                is_other = self._question.is_news and self.view.show(*told)
                self._pace.took(self._question.spent_s + time.thread_time() - began)
                self._is_stale |= is_other
        except Exception:  # a view must not disturb the cell that it shows
            _log.debug("a panel could not be updated", exc_info=True)

    def _after_cell(self, result: Any) -> None:
        if not self._cluster.running:
            self.close()
            return
        try:
            self.update()
            if self._is_stale and self._saved is not None:
                self._is_stale = False
                self._saved.update(self._folded(), raw=True)
        except Exception:  # a view is never worth a cell
            _log.warning("The saved picture of a panel could not be made anew.", exc_info=True)

    def _follow(self) -> None:
        while not self._closed.wait(self._pace.wait_s):
            if self.view.watched and self._cluster.busy:
                self.update()

    def _folded(self) -> dict[str, str]:
        bundle = self.view.to_bundle()
        summary = "the same as a picture, which stays in the saved notebook"
        return {**bundle, "text/html": f"<details><summary>{summary}</summary>{bundle['text/html']}</details>"}
