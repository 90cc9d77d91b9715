"""The line in a running cell's output that says who is waited for: updated in place, taken away when the wait ends."""

from __future__ import annotations

import uuid

from axon_nb.cluster.output.sinks import Sink, is_in_place

__all__ = ["WaitNotice"]

_EVERY_S = 1.0
_MAX_PLACES = 10
"""Each new wait is told below what was printed before it; after so many, at the last place."""
_LATER = 10.0
"""Where lines cannot be taken away, a wait is told again when it has lasted this many times as long."""


class WaitNotice:
    """One line at most at any time; on the notebook's thread.

    Args:
        sink: Where the cell's output goes.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._in_place = is_in_place(sink)
        self._id = ""
        self._num_places = 0
        self._shown = ""
        self._shown_at = 0.0
        self._began = 0.0

    def show(self, sentence: str, now: float) -> None:
        """Show `sentence`, at most once a second; empty: nobody is waited for."""
        if not sentence:
            self.hide()
        elif not self._in_place:
            self._print(sentence, now)
        elif sentence != self._shown and (not self._shown or now - self._shown_at >= _EVERY_S):
            update = bool(self._shown) or self._num_places >= _MAX_PLACES
            if not update:
                self._id = f"axon_nb-waits-{uuid.uuid4().hex}"
                self._num_places += 1
            self._shown, self._shown_at = sentence, now
            self._publish(sentence, update=update)

    def _print(self, sentence: str, now: float) -> None:
        if not self._shown:
            self._began = now
        # The beginning of a wait is about 3 s before its first telling.
        elif now - self._began < _LATER * max(3.0, self._shown_at - self._began):
            return
        self._shown, self._shown_at = sentence, now
        self._sink.stream("stdout", f"{sentence}\n")

    def hide(self) -> None:
        """Take the line away; nothing if there is none. Lines that were printed stay."""
        if self._shown and self._in_place:
            self._publish("", update=True)
        self._shown = ""

    def _publish(self, text: str, *, update: bool) -> None:
        self._sink.display({"text/plain": text}, {}, display_id=self._id, update=update)
