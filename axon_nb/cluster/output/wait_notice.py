"""The line in a running cell's output that says which rank the others wait for; it disappears when the wait ends."""

from __future__ import annotations

import uuid

from axon_nb.cluster.output.sinks import Sink, is_in_place

_UPDATE_INTERVAL_S = 1.0
_MAX_DISPLAYS = 10
"""Each wait gets a new line below the output so far; after this many, waits reuse the last line."""
_REPEAT_FACTOR = 10.0
"""If lines cannot be removed, a wait is reported again after it has lasted this many times as long."""
_FIRST_NOTICE_S = 3.0
"""A wait has lasted about this long when it is first reported."""


class WaitNotice:
    """Shows at most one line at a time; on the notebook's thread.

    Args:
        sink: Where the cell's output goes.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._in_place = is_in_place(sink)
        self._id = ""
        self._num_displays = 0
        self._shown = ""
        self._shown_at = 0.0
        self._first_shown_at = 0.0

    def show(self, sentence: str, now: float) -> None:
        """Show `sentence`, updated at most once per second; if it is empty, hide the line."""
        if not sentence:
            self.hide()
        elif not self._in_place:
            self._print(sentence, now)
        elif sentence != self._shown and (not self._shown or now - self._shown_at >= _UPDATE_INTERVAL_S):
            update = bool(self._shown) or self._num_displays >= _MAX_DISPLAYS
            if not update:
                self._id = f"axon_nb-waits-{uuid.uuid4().hex}"
                self._num_displays += 1
            self._shown, self._shown_at = sentence, now
            self._publish(sentence, update=update)

    def _print(self, sentence: str, now: float) -> None:
        if not self._shown:
            self._first_shown_at = now
        elif now - self._first_shown_at < _REPEAT_FACTOR * max(_FIRST_NOTICE_S, self._shown_at - self._first_shown_at):
            return
        self._shown, self._shown_at = sentence, now
        self._sink.stream("stdout", f"{sentence}\n")

    def hide(self) -> None:
        """Remove the line if there is one; lines that were printed stay."""
        if self._shown and self._in_place:
            self._publish("", update=True)
        self._shown = ""

    def _publish(self, text: str, *, update: bool) -> None:
        self._sink.display({"text/plain": text}, {}, display_id=self._id, update=update)
