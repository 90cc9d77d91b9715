"""Base classes of live views: widgets with one script and one style, described in one line where widgets are not shown.

A `LiveView` draws one record, which a panel keeps up to date and which is sent only while a page shows it.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from abc import abstractmethod
from typing import Any

import anywidget
import traitlets

_HEARTBEAT_TIMEOUT_S = 12.0


class View(anywidget.AnyWidget):
    """A widget; subclasses name their script and style: `_esm = script(...)`, `_css = style(...)`."""

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
        # A weak reference, so that the callback does not keep an unused view alive.
        view_ref = weakref.ref(self)
        self.on_msg(lambda _, message, buffers: _on_message(view_ref, message))

    @abstractmethod
    def make_content(self) -> dict[str, Any]:
        """Return what the page draws now; called with the lock held."""

    @abstractmethod
    def to_bundle(self) -> dict[str, str]:
        """Return what is shown now as `text/html` and `text/plain`, which need neither a kernel nor scripts."""

    def on_op(self, op: str) -> None:
        """Handle a message from the page other than a heartbeat; from any thread."""

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


def _on_message(view_ref: weakref.ref[LiveView], message: dict[str, Any]) -> None:
    view = view_ref()
    if view is None:
        return
    view._last_heartbeat = time.monotonic()
    if view._is_stale:
        view.refresh()
    if (op := str(message.get("op"))) != "heartbeat":
        view.on_op(op)
