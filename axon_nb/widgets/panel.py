"""What panels have in common that follow a cluster: live in one output, a saved picture in a second one, folded.

How often ranks are asked while they work, so that answering takes little of their time, however large a model is.

All views ask at the same moments (`records.beat`), and all ranks at once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import DisplayHandle, display

from axon_nb.cluster.cluster import Cluster
from axon_nb.records.telemetry import TICK_S, seconds_to_tick

__all__ = ["FollowingPanel", "Pace"]

_SHARE = 0.004
"""Of a rank's time: what one view takes at most. Ranks that meet in collectives wait for the one that answers."""
_SELDOM_S = 10.0
"""Even of a huge model nothing that is shown is older, give or take a beat."""


class Pace:
    """Seconds between two questions, a multiple of `TICK_S`.

    Args:
        least_s: No fewer, however little an answer costs.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._before = 0.0
        self.every_s = _in_beats(least_s)

    def took(self, seconds: float) -> None:
        """The last answer has cost so much; one that costs more than the one before it changes nothing yet."""
        usual, self._before = min(seconds, self._before), seconds
        self.every_s = _in_beats(max(self._least_s, min(usual / _SHARE, _SELDOM_S)))

    @property
    def wait_s(self) -> float:
        """Seconds until the next question."""
        return seconds_to_tick(self.every_s)


def _in_beats(seconds: float) -> float:
    return math.ceil(seconds / TICK_S) * TICK_S


_SUMMARY = "the same as a picture, which stays in the saved notebook"
_log = logging.getLogger("axon_nb.panels")


class FollowingPanel(ABC):
    """Asks a cluster while somebody looks and a cell runs, and after each cell.

    Args:
        cluster: Whose ranks are asked.
        every_s: Seconds between two questions, at least.
    """

    view: Any
    """The widget, a `LiveView`."""

    def __init__(self, cluster: Cluster, *, every_s: float) -> None:
        self._cluster = cluster
        self._pace = Pace(every_s)
        self._asking = threading.Lock()
        self._closed = threading.Event()
        self._saved: DisplayHandle | None = None
        self._saved_html = ""
        self._shell: InteractiveShell | None = None

    @abstractmethod
    def ask(self) -> float:
        """Ask the ranks, and show what they say.

        Returns:
            Seconds that the answer has cost a rank, at most.

        Raises:
            AxonError: they cannot be asked.
        """

    def cluster_is_gone(self) -> None:  # noqa: B027 -- most have nothing to say then
        """On the notebook's thread: there is nobody to ask any more."""

    def open(self, shell: InteractiveShell) -> None:
        """Show it in the running cell, and follow the cluster from now on."""
        display(self.view)
        self._saved = display(self._folded(), raw=True, display_id=True)
        self._shell = shell
        shell.events.register("post_run_cell", self._after_cell)
        threading.Thread(target=self._follow, name="axon_nb-panel", daemon=True).start()

    @property
    def closed(self) -> bool:
        """Whether it follows no more."""
        return self._closed.is_set()

    def close(self) -> None:
        """Follow no more; what is shown stays."""
        self._closed.set()
        if self._shell is not None:
            self._shell.events.unregister("post_run_cell", self._after_cell)
            self._shell = None

    def update(self) -> None:
        """Ask the ranks and show what they say; when that goes wrong, what is shown stays as it is."""
        try:
            with self._asking:
                began = time.thread_time()
                spent_s = self.ask()
                self._pace.took(spent_s + time.thread_time() - began)
        except Exception:  # a view must not disturb the cell that it shows
            _log.debug("a panel could not be updated", exc_info=True)

    def _after_cell(self, result: Any) -> None:
        try:
            if self._cluster.running:
                self.update()
            else:
                self.cluster_is_gone()
                self.close()
            before = self._saved_html
            bundle = self._folded()
            if self._saved is not None and self._saved_html != before:
                self._saved.update(bundle, raw=True)
        except Exception:  # a view is never worth a cell
            _log.warning("The saved picture of a panel could not be made anew.", exc_info=True)

    def _follow(self) -> None:
        was_busy = False
        while not self._closed.wait(self._pace.wait_s):
            busy = bool(self._cluster.busy)
            if busy != was_busy:
                was_busy = busy
                (self.view.cell_begins if busy else self.view.cell_ends)()
            if busy and self.view.watched:
                self.update()

    def _folded(self) -> dict[str, str]:
        bundle = self.view.to_bundle()
        self._saved_html = bundle["text/html"]
        return {**bundle, "text/html": f"<details><summary>{_SUMMARY}</summary>{self._saved_html}</details>"}
