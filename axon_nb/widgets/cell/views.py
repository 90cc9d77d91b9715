"""The views of `--watch`: an activity strip, with a row per rank, and a timeline of one cell.

They stay as they are when the cell ends, above a folded picture with a table that is saved, until more cells with views
have run; `result.show()` opens them again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import traitlets
from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.inspection.feeds import StateFeed
from axon_nb.records.telemetry import RankState
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.cell.activity import SILENCE_S, TERMINAL, Clock, RankHistory, encode, strip_bundle
from axon_nb.widgets.html import ACTIVITIES, figure, foldable
from axon_nb.widgets.panel import View
from axon_nb.widgets.timeline.page import timeline_bundle
from axon_nb.widgets.timeline.view import TimelineView

_MAX_QUEUED = 50_000
_MAX_SEGMENTS = 32_768  # of all ranks: some 1.5 MB, half of what Jupyter's server lets through in its 3 s window
_MAX_DELAY_NS = 2_000_000_000  # for a sample whose rank shares the notebook's clock
_KEEPALIVE_S = 5.0  # the browser reports a lost kernel after three times as long without a message
_log = logging.getLogger(__name__)
_COLLECT_TIMEOUT_S = 1.0
_MAX_LIVE = 3
"""Cells whose views stay open; those of earlier ones are closed, and their pictures unfold."""
_live: deque[tuple[View, ...]] = deque()


class RankStrip(View):
    """What each rank does, second by second, while a cell runs.

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
        self._is_shown = False
        self.in_terminal = False
        """Whether it is printed at the end."""
        super().__init__(config=_config(ranks, title))

    def start(self) -> None:
        """Show the strip in the running cell; its clock starts now. In a terminal it is printed at the end."""
        self._start_ns = time.monotonic_ns()
        self.in_terminal = not hasattr(get_ipython(), "kernel")
        if not self.in_terminal:
            self._is_shown = True
            display(self)

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
        """End the strip with the cell; once more, add what was late, such as the end of the last rank."""
        with self._lock:
            self._drain()
            is_first = self._end is None
            if self._end is None:
                self._end = self._seconds(time.monotonic_ns())
            message = self._changes(self._end, last=is_first)
        if message is not None:
            self.send({"op": "append"}, buffers=[message])
        if self.in_terminal and is_first:
            print(self.to_bundle()["text/plain"])

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
        if has_snapshot and self._is_shown:
            with self._lock:
                self._drain()
                state["snapshot"] = self._encode(starts=[0] * len(self._histories))
        return state

    def on_message(self, message: dict[str, Any]) -> None:
        """Send everything in the next message if the browser missed one."""
        if message.get("op") == "resend":
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


class _TextReader:
    """Stands in for a view if no widget can be shown: spans are recorded for the text at the end."""

    wanted = True

    def pump(self) -> None:
        """Show nothing while the cell runs."""


class CellViews:
    """The views of one cell; their errors are logged and never reach it.

    Args:
        cluster: Where it ran.
        ranks: Its ranks that run the cell.
        title: Text such as ``In [3]``.
    """

    def __init__(self, cluster: Cluster, ranks: Sequence[int], title: str) -> None:
        self._ranks = list(ranks)
        self._title = title
        self._feed = cluster.spans
        self._strip = RankStrip(ranks, title=title)
        self._watch = StateFeed(cluster.client, ranks, self._strip)
        self._timeline: TimelineView | None = None
        self._reader: TimelineView | _TextReader = _TextReader()
        self._first = 0
        """The number that the cell's first span has in the feed's store."""
        self._picture: DisplayHandle | None = None

    @property
    def watch(self) -> StateFeed:
        """What feeds the strip; it is passed to `Cluster.run`."""
        return self._watch

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """Keep the views up to date until the block is left; those of the last cells then stay as they are."""
        for open_view in (self._strip.start, self._open):
            with _logged("shown"):
                open_view()
        try:
            with self._watch:
                yield
        finally:
            with _logged("saved"):
                self._finish()

    def show(self) -> None:
        """Show both views again: widgets above their pictures in a notebook, text elsewhere."""
        self._feed.collect(timeout_s=_COLLECT_TIMEOUT_S)  # a busy rank may not have sent all when the cell ended
        bundle = self._bundle()
        if self._timeline is None:
            print(bundle["text/plain"])
            return
        for view in (self._strip, self._timeline):
            display(_reopened(view))
        display(bundle, raw=True)

    def _open(self) -> None:
        self._feed.collect(timeout_s=1.0, watch_s=5.0)
        self._first = self._feed.store.end
        if not self._strip.in_terminal:
            since_ns = time.monotonic_ns()
            view = TimelineView(self._feed, self._ranks, title=self._title, begin=self._first, since_ns=since_ns)
            self._timeline = self._reader = view
            display(view)
            count = f"{len(self._ranks)} rank{'s' * (len(self._ranks) != 1)}"
            running = figure("", heading=", ".join(filter(None, ("Activity", self._title, count, "running"))))
            bundle = {"text/html": foldable(running), "text/plain": ""}
            self._picture = display(bundle, raw=True, display_id=True)
        self._feed.open(self._reader)

    def _finish(self) -> None:
        self._feed.close(self._reader)
        self._feed.collect(timeout_s=0.5)
        if self._timeline is None:
            print(self._timeline_bundle()["text/plain"])
            return
        self._strip.finish()
        self._timeline.finish()
        if self._picture is not None:
            self._picture.update(self._bundle(), raw=True)
        _live.append((self._strip, self._timeline))
        if len(_live) > _MAX_LIVE:
            for view in _live.popleft():
                view.close()

    def _timeline_bundle(self) -> dict[str, str]:
        if self._timeline is not None:
            return self._timeline.to_bundle()
        return timeline_bundle(self._feed.store.table(self._first), self._ranks, title=self._title)

    def _bundle(self) -> dict[str, str]:
        bundles = (self._strip.to_bundle(), self._timeline_bundle())
        html, text = ("\n".join(bundle[kind] for bundle in bundles) for kind in ("text/html", "text/plain"))
        return {"text/html": foldable(html), "text/plain": text}


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        _log.warning("The activity of the ranks could not be %s.", what, exc_info=True)


@contextlib.contextmanager
def cell_views(cluster: Cluster, ranks: Sequence[int], *, title: str) -> Iterator[CellViews | None]:
    """Show the activity of these ranks until the block is left.

    Args:
        cluster: Where the cell runs.
        ranks: Its ranks that run the cell.
        title: Text such as ``In [3]``.

    Yields:
        The views; None if they could not be made, which is logged and never reaches the cell.
    """
    try:
        views = CellViews(cluster, ranks, title)
    except Exception:
        _log.warning("The activity of the ranks could not be shown.", exc_info=True)
        yield None
        return
    with views.live():
        yield views


def _reopened(view: Any) -> Any:
    """Return a widget that is open, with its state; ipywidgets does not show closed ones."""
    if view.comm is None:
        vars(view).pop("_repr_mimebundle_", None)
        view._model_id = None  # the page no longer knows the old one
        view.open()
    return view
