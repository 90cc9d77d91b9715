"""The live view of `--watch`: one strip per rank that grows while a cell runs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import traitlets
from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

from axon_nb.records.telemetry import RankState
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.cell.page import strip_bundle
from axon_nb.widgets.cell.segments import SILENCE_S, TERMINAL, Clock, RankHistory, encode
from axon_nb.widgets.palette import ACTIVITIES
from axon_nb.widgets.view import View

_MAX_QUEUED = 50_000
_MAX_SEGMENTS = 32_768  # of all ranks: some 1.5 MB, half of what Jupyter's server lets through in its 3 s window
_MAX_DELAY_NS = 2_000_000_000  # for a sample whose rank shares the notebook's clock
_KEEPALIVE_S = 5.0  # the browser reports a lost kernel after three times as long without a message


class RankStrip(View):
    """What each rank does, second by second, while a cell runs; a picture and a table once it has ended.

    `add` may be called from any thread; everything else belongs to the notebook's main thread.
    """

    _esm = script("strip")
    _css = style("strip")

    config = traitlets.Dict().tag(sync=True)
    """What does not change: ranks, title, paints; seconds of silence after which an activity is unknown."""
    snapshot = traitlets.Bytes(b"").tag(sync=True)
    """All segments, for a page that opens later; made on request and empty otherwise."""

    def __init__(self, ranks: Sequence[int], *, title: str = "") -> None:
        # The base class requests the state while it starts.
        self._lock = threading.Lock()
        self._queue: deque[tuple[int, RankState]] = deque()
        limit = max(256, min(8192, _MAX_SEGMENTS // max(1, len(ranks))))
        self._histories = {rank: RankHistory(rank, limit=limit) for rank in ranks}
        self._clock_offsets_ns: dict[int, int] = {}
        self._title = title
        self._lost = self._lost_sent = 0
        self._start_ns = time.monotonic_ns()
        self._end: float | None = None
        self._sent_at = 0.0
        self._handle: DisplayHandle | None = None
        self._in_terminal = False
        self._reopened = False
        super().__init__(config=_config(ranks, title))
        self.on_msg(self._on_message)

    def start(self) -> None:
        """Show the strip in the running cell; its clock starts now. In a terminal it is printed at the end."""
        self._start_ns = time.monotonic_ns()
        shell = get_ipython()
        self._in_terminal = shell is not None and not hasattr(shell, "kernel")
        if not self._in_terminal:
            self._handle = display(self, display_id=True)

    def add(self, states: Iterable[RankState]) -> None:
        """Queue samples for the next `flush`; from any thread. Ranks that the strip does not show are ignored."""
        samples = [state for state in states if state.rank in self._histories]
        arrival_ns = time.monotonic_ns()
        with self._lock:
            room = max(0, _MAX_QUEUED - len(self._queue))
            self._queue.extend((arrival_ns, state) for state in samples[:room])
            self._lost += max(0, len(samples) - room)

    def flush(self) -> None:
        """Send what was queued since the last call, in one message; if nothing was, only a keep-alive now and then."""
        with self._lock:
            if self._end is not None:
                return
            self._drain()
            message = self._changes(self._seconds(time.monotonic_ns()))
        if message is not None:
            self.send({"op": "append"}, buffers=[message])

    def finish(self) -> None:
        """End the strip with the cell: the live view becomes a picture and a table, saved with the notebook."""
        with self._lock:
            if self._end is not None:
                return
            self._drain()
            self._end = self._seconds(time.monotonic_ns())
            message = self._changes(self._end, last=True)
        self.send({"op": "append"}, buffers=[message])
        if self._handle is not None:
            self._handle.update(self.to_bundle(), raw=True)
        elif self._in_terminal:
            print(self.to_bundle()["text/plain"])
        # The update does not reach a page that was opened while the cell ran: its view stays open.
        if not self._reopened:
            self.close()

    def to_bundle(self) -> dict[str, str]:
        """Return what happened so far as `text/html` and `text/plain`, which need neither a kernel nor scripts."""
        with self._lock:
            self._drain()
            end = self._seconds(time.monotonic_ns()) if self._end is None else self._end
            return strip_bundle(list(self._histories.values()), title=self._title, end=end, lost=self._lost)

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """Return the traits for a front end; `snapshot` is made here, so that a reloaded page has the whole strip."""
        state = super().get_state(key=key, drop_defaults=drop_defaults)
        has_snapshot = key is None or key == "snapshot" or (not isinstance(key, str) and "snapshot" in key)
        if has_snapshot and self._handle is not None:
            with self._lock:
                self._reopened = True
                self._drain()
                state["snapshot"] = self._encode(starts=[0] * len(self._histories))
        return state

    def _on_message(self, _: object, content: dict[str, Any], buffers: object) -> None:
        # The browser missed a message: the next one contains everything.
        if content.get("op") == "resend":
            with self._lock:
                for history in self._histories.values():
                    history.changed_from = 0

    def _drain(self) -> None:
        while self._queue:
            arrival_ns, state = self._queue.popleft()
            now_ns = state.time_ns + self._clock_offset(state, arrival_ns)
            since_ns = state.since_ns + now_ns - state.time_ns
            self._histories[state.rank].add(
                state, now=self._seconds(now_ns), since=self._seconds(since_ns) if state.since_ns else None
            )

    def _clock_offset(self, state: RankState, arrival_ns: int) -> int:
        """Return the nanoseconds to add to a sample's times: another host has an unrelated monotonic clock."""
        delay_ns = arrival_ns - state.time_ns
        if abs(delay_ns) <= _MAX_DELAY_NS:
            if state.activity not in TERMINAL:  # the notebook makes such samples, too, for ranks of any host
                self._clock_offsets_ns.setdefault(state.rank, 0)
            return 0
        return self._clock_offsets_ns.setdefault(state.rank, delay_ns)

    def _seconds(self, time_ns: int) -> float:
        return max(0.0, (time_ns - self._start_ns) / 1e9)

    def _changes(self, now: float, *, last: bool = False) -> bytes | None:
        starts = [history.changed_from for history in self._histories.values()]
        is_unchanged = self._lost == self._lost_sent and all(
            start >= len(history.segments) for start, history in zip(starts, self._histories.values(), strict=True)
        )
        if is_unchanged and now - self._sent_at < _KEEPALIVE_S and not last:
            return None
        self._sent_at = now
        for history in self._histories.values():
            history.changed_from = len(history.segments)
        self._lost_sent = self._lost
        return self._encode(starts=starts)

    def _encode(self, *, starts: Sequence[int]) -> bytes:
        now = self._seconds(time.monotonic_ns()) if self._end is None else self._end
        clock = Clock(now=now, lost=self._lost, finished=self._end is not None)
        return encode(list(self._histories.values()), clock, starts=starts)


def _config(ranks: Sequence[int], title: str) -> dict[str, Any]:
    return {
        "ranks": list(ranks),
        "title": title,
        "silence": SILENCE_S,
        "paints": [
            {
                "name": paint.activity.value,
                "label": paint.label,
                "token": paint.token,
                "form": paint.form,
                "terminal": paint.activity in TERMINAL,
            }
            for paint in ACTIVITIES
        ],
    }
