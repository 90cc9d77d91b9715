"""What all live views are: widgets of one script and one style, described in one line where widgets are not shown.

What views have in common that a panel keeps up to date: one record that is drawn, sent while somebody looks.
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

__all__ = ["LiveView", "View"]


class View(anywidget.AnyWidget):
    """Subclasses name their script and style: `_esm = script(...)`, `_css = style(...)`."""

    def __repr__(self) -> str:
        """Shown where widgets are not, besides the saved picture."""
        return "A live view, for which this front end needs ipywidgets; a picture of it is beside it."


_SEEN_S = 12.0


class LiveView(View):
    """A page that shows it says so every few seconds; without one nothing is sent."""

    content = traitlets.Dict().tag(sync=True)
    """What is drawn."""

    def __init__(self) -> None:
        # The base class asks for the state while it starts.
        self._lock = threading.Lock()
        self._seen = -math.inf
        self._seen_before = -1.0
        self._is_stale = False
        self._updates = 0
        super().__init__(content=self._numbered())
        # Held weakly: a view that nobody has any more is not kept by its own callback.
        me = weakref.ref(self)
        self.on_msg(lambda _, message, buffers: _heard(me, message))

    @abstractmethod
    def make_content(self) -> dict[str, Any]:
        """What is drawn now; called with the lock held."""

    @abstractmethod
    def to_bundle(self) -> dict[str, str]:
        """What is shown now as `text/html` and `text/plain`, which need neither a kernel nor scripts."""

    def on_op(self, op: str) -> None:
        """From any thread: the page has sent something else than a sign of life."""

    @property
    def watched(self) -> bool:
        """Whether a page has shown it in the last seconds, or did when the cell began that runs now.

        Some front ends' messages come through only when no cell runs.
        """
        return time.monotonic() - self._seen < _SEEN_S or self._seen == self._seen_before

    def cell_begins(self) -> None:
        """From any thread: a cell runs from now on."""
        self._seen_before = self._seen if self.watched else -1.0

    def cell_ends(self) -> None:
        """From any thread: no cell runs any more."""
        self._seen_before = -1.0

    def refresh(self, *, unseen: bool = False) -> None:
        """Send what is drawn now; from any thread. When no page shows it, only with `unseen`."""
        if not (self.watched or unseen):
            self._is_stale = True
            return
        self._is_stale = False
        with self._lock:
            self._updates += 1
            content = self._numbered()
        self.content = content

    def _numbered(self) -> dict[str, Any]:
        return {**self.make_content(), "updates": self._updates}


def _heard(me: weakref.ref[LiveView], message: dict[str, Any]) -> None:
    view = me()
    if view is None:
        return
    view._seen = time.monotonic()
    if view._is_stale:
        view.refresh()
    if (op := str(message.get("op"))) != "here":
        view.on_op(op)
