"""Base classes of live views, and panels: a view in one output, and in a second its picture, which is saved.

A view is a widget with one script and one style, described in one line where widgets are not shown. A `LiveView` draws
one record, which a panel keeps up to date and which is sent only while a page shows it.

A `LivePanel` also polls the ranks while they work, seldom enough that replying takes little of their time, even for
large models. All panels poll at the same moments (`records.telemetry.seconds_to_tick`), and all ranks at once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from typing import Any

import anywidget
import traitlets
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import DisplayHandle, display

from axon_nb.cluster.cluster import Cluster
from axon_nb.records.telemetry import TICK_S, seconds_to_tick
from axon_nb.widgets.html import foldable

_HEARTBEAT_TIMEOUT_S = 12.0
_log = logging.getLogger("axon_nb.panels")
_MAX_SHARE = 0.004
"""Share of a rank's time, for one view. Ranks that communicate wait for the one that replies."""
_MAX_INTERVAL_S = 10.0
"""Even for a huge model: data shown is at most this old, give or take a tick."""


class View(anywidget.AnyWidget):
    """A widget; subclasses name their script and style: `_esm = script(...)`, `_css = style(...)`."""

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        # A weak reference, so that the callback does not keep an unused view alive.
        on_message = weakref.WeakMethod(self.on_message)
        self.on_msg(lambda _, message, buffers: (method := on_message()) and method(message))

    def on_message(self, message: dict[str, Any]) -> None:
        """Handle a message from a page; on the notebook's thread."""

    def __repr__(self) -> str:
        """Empty: where widgets are not shown, the picture below it is."""
        return ""


class LiveView(View):
    """A view that is sent only while a page shows it, which the page reports with a heartbeat every few seconds."""

    content = traitlets.Dict().tag(sync=True)
    """What the page draws."""

    def __init__(self) -> None:
        # The base class requests the state while it starts.
        self._lock = threading.Lock()
        self._last_heartbeat = -math.inf
        self._last_heartbeat_before_cell = -1.0
        self._is_stale = False
        self._updates = 0
        super().__init__(content=self._numbered_content())

    @abstractmethod
    def make_content(self) -> dict[str, Any]:
        """Return what the page draws now; called with the lock held."""

    @abstractmethod
    def to_bundle(self) -> dict[str, str]:
        """Return what is shown now as `text/html` and `text/plain`, which need neither a kernel nor scripts."""

    def on_message(self, message: dict[str, Any]) -> None:
        """Note that a page shows it; all messages tell so."""
        self._last_heartbeat = time.monotonic()
        if self._is_stale:
            self.refresh()

    @property
    def watched(self) -> bool:
        """Whether a page has shown it in the last seconds, or did when the running cell started.

        Some front ends' messages arrive only while no cell runs.
        """
        is_recent = time.monotonic() - self._last_heartbeat < _HEARTBEAT_TIMEOUT_S
        return is_recent or self._last_heartbeat == self._last_heartbeat_before_cell

    def on_cell_start(self) -> None:
        """Note that a cell starts; from any thread."""
        self._last_heartbeat_before_cell = self._last_heartbeat if self.watched else -1.0

    def on_cell_end(self) -> None:
        """Note that no cell runs anymore; from any thread."""
        self._last_heartbeat_before_cell = -1.0

    def refresh(self, *, unseen: bool = False) -> None:
        """Send the current content; from any thread.

        Args:
            unseen: Whether to send it even if no page shows it.
        """
        if not (self.watched or unseen):
            self._is_stale = True
            return
        self._is_stale = False
        with self._lock:
            self._updates += 1
            content = self._numbered_content()
        self.content = content

    def _numbered_content(self) -> dict[str, Any]:
        return {**self.make_content(), "updates": self._updates}


class Panel(ABC):
    """A view and its picture, which is redrawn after each cell, and folded while the view is shown."""

    view: Any = None
    """The widget; None: there is a picture only."""

    def __init__(self) -> None:
        self._saved: DisplayHandle | None = None
        self._saved_html = ""
        self._shell: InteractiveShell | None = None

    @abstractmethod
    def after_cell(self) -> None:
        """Bring the view up to date, or close the panel if the cluster has stopped."""

    def picture(self) -> dict[str, str]:
        """Return what the view shows now, as `text/html` and `text/plain`."""
        bundle: dict[str, str] = self.view.to_bundle()
        return bundle

    def open(self, shell: InteractiveShell) -> None:
        """Show the panel in the running cell and update it from now on."""
        if self.view is not None:
            display(self.view)
        self._shell = shell
        self._saved = display(self._foldable_picture(shell), raw=True, display_id=True)
        shell.events.register("post_run_cell", self._after_cell)

    def close(self) -> None:
        """Stop updating; what is shown stays."""
        if self._shell is not None:
            self._shell.events.unregister("post_run_cell", self._after_cell)
            self._shell = None

    def _after_cell(self, result: Any) -> None:
        try:
            self.after_cell()
            before = self._saved_html
            bundle = self._foldable_picture(self._shell)
            if self._saved is not None and self._saved_html != before:
                self._saved.update(bundle, raw=True)
        except Exception:  # a view must not fail a cell
            _log.warning("The saved picture of a panel could not be updated.", exc_info=True)

    def _foldable_picture(self, shell: InteractiveShell | None) -> dict[str, str]:
        bundle = self.picture()
        self._saved_html = bundle["text/html"]
        history = getattr(shell, "history_manager", None)
        after = f"In [{len(history.input_hist_parsed) - 1}]" if history is not None else ""
        return {**bundle, "text/html": foldable(self._saved_html, after=after)}


class PollSchedule:
    """How often ranks are polled: a multiple of `TICK_S`, larger if replies are expensive.

    Args:
        min_interval_s: Seconds between two polls, however cheap a reply is.
    """

    def __init__(self, min_interval_s: float) -> None:
        self._min_interval_s = min_interval_s
        self._previous_cost_s = 0.0
        self.interval_s = _round_up_to_ticks(min_interval_s)

    def record_cost(self, seconds: float) -> None:
        """Adapt to the cost of the last reply; a single costlier reply changes nothing yet."""
        usual_s, self._previous_cost_s = min(seconds, self._previous_cost_s), seconds
        self.interval_s = _round_up_to_ticks(max(self._min_interval_s, min(usual_s / _MAX_SHARE, _MAX_INTERVAL_S)))

    @property
    def wait_s(self) -> float:
        """Seconds until the next poll."""
        return seconds_to_tick(self.interval_s)


def _round_up_to_ticks(seconds: float) -> float:
    return math.ceil(seconds / TICK_S) * TICK_S


class LivePanel(Panel):
    """A panel that polls a cluster while a page shows it and a cell runs, and after each cell.

    Args:
        cluster: The cluster whose ranks are polled.
        min_interval_s: Minimum number of seconds between two polls.
    """

    view: Any
    """The widget, a `LiveView`."""

    def __init__(self, cluster: Cluster, *, min_interval_s: float) -> None:
        super().__init__()
        self._cluster = cluster
        self._schedule = PollSchedule(min_interval_s)
        self._polling = threading.Lock()
        self._closed = threading.Event()

    @abstractmethod
    def poll(self) -> float:
        """Query the ranks and show their replies.

        Returns:
            Seconds that replying cost a rank, at most.

        Raises:
            AxonError: The ranks cannot be queried.
        """

    def on_cluster_stopped(self) -> None:
        """Show that there are no ranks to poll anymore; on the notebook's thread."""

    def open(self, shell: InteractiveShell) -> None:
        """Show the panel in the running cell and poll the cluster from now on."""
        super().open(shell)
        threading.Thread(target=self._poll_while_busy, name="axon_nb-panel", daemon=True).start()

    @property
    def closed(self) -> bool:
        """Whether it no longer polls."""
        return self._closed.is_set()

    def close(self) -> None:
        """Stop polling; what is shown stays."""
        self._closed.set()
        super().close()

    def update(self) -> None:
        """Query the ranks and show their replies; if that fails, what is shown stays as it is."""
        try:
            with self._polling:
                start_s = time.thread_time()
                rank_cost_s = self.poll()
                self._schedule.record_cost(rank_cost_s + time.thread_time() - start_s)
        except Exception:  # a view must not disturb the cell that it shows
            _log.debug("a panel could not be updated", exc_info=True)

    def after_cell(self) -> None:
        """Query the ranks once more, or close the panel if the cluster has stopped."""
        if self._cluster.running:
            self.update()
        else:
            self.on_cluster_stopped()
            self.close()

    def _poll_while_busy(self) -> None:
        was_busy = False
        while not self._closed.wait(self._schedule.wait_s):
            is_busy = bool(self._cluster.busy)
            if is_busy != was_busy:
                was_busy = is_busy
                (self.view.on_cell_start if is_busy else self.view.on_cell_end)()
            if is_busy and self.view.watched:
                self.update()
