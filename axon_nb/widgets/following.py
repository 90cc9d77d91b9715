"""What panels have in common that follow a cluster: live in one output, a saved picture in a second one, folded."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import DisplayHandle, display

from axon_nb.cluster.cluster import Cluster
from axon_nb.errors import AxonError

__all__ = ["FollowingPanel"]

_SUMMARY = "the same as a picture, which stays in the saved notebook"


class FollowingPanel(ABC):
    """Asks a cluster while somebody looks and a cell runs, and after each cell.

    Args:
        cluster: Whose ranks are asked.
        every_s: Seconds between two questions.
    """

    view: Any
    """The widget; it has `watched` and `to_bundle`."""

    def __init__(self, cluster: Cluster, *, every_s: float) -> None:
        self._cluster = cluster
        self._every_s = every_s
        self._asking = threading.Lock()
        self._closed = threading.Event()
        self._saved: DisplayHandle | None = None
        self._shell: InteractiveShell | None = None

    @abstractmethod
    def ask(self) -> None:
        """Ask the ranks, and show what they say.

        Raises:
            AxonError: they cannot be asked.
        """

    def open(self, shell: InteractiveShell) -> None:
        """Show it in the running cell, and follow the cluster from now on."""
        display(self.view)
        self._saved = display(self._folded(), raw=True, display_id=True)
        self._shell = shell
        shell.events.register("post_run_cell", self._after_cell)
        threading.Thread(target=self._follow, name="axon_nb-panel", daemon=True).start()

    def close(self) -> None:
        """Follow no more; what is shown stays."""
        self._closed.set()
        if self._shell is not None:
            self._shell.events.unregister("post_run_cell", self._after_cell)
            self._shell = None

    def update(self) -> bool:
        """Ask the ranks and show what they say; False when they cannot be asked: what is shown stays as it is."""
        try:
            with self._asking:
                self.ask()
        except (AxonError, OSError, RuntimeError):
            return False
        return True

    def _after_cell(self, result: Any) -> None:
        if not self._cluster.running:
            self.close()
            return
        if self.update() and self._saved is not None:
            self._saved.update(self._folded(), raw=True)

    def _follow(self) -> None:
        while not self._closed.wait(self._every_s):
            if self.view.watched and self._cluster.busy:
                self.update()

    def _folded(self) -> dict[str, str]:
        bundle = self.view.to_bundle()
        return {**bundle, "text/html": f"<details><summary>{_SUMMARY}</summary>{bundle['text/html']}</details>"}
