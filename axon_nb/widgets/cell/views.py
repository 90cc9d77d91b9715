"""The views of `--watch`: an activity strip, with a row per rank, and a timeline of one cell.

They are live while the cell runs and pictures with a table afterwards; `result.show()` opens them again.
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
from axon_nb.cluster.inspection.feeds import SpanFeed, StateFeed
from axon_nb.cluster.inspection.spans import SpanTable
from axon_nb.records.telemetry import RankState
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.cell.activity import SILENCE_S, TERMINAL, Clock, RankHistory, encode, strip_bundle
from axon_nb.widgets.html import ACTIVITIES, foldable
from axon_nb.widgets.panel import View
from axon_nb.widgets.timeline.page import timeline_bundle
from axon_nb.widgets.timeline.view import TimelineView

_MAX_QUEUED = 50_000
_MAX_SEGMENTS = 32_768  # of all ranks: some 1.5 MB, half of what Jupyter's server lets through in its 3 s window
_MAX_DELAY_NS = 2_000_000_000  # for a sample whose rank shares the notebook's clock
_KEEPALIVE_S = 5.0  # the browser reports a lost kernel after three times as long without a message
_log = logging.getLogger(__name__)
_PUMP_INTERVAL_S = 0.1
_COLLECT_TIMEOUT_S = 1.0
_PAGE_TIMEOUT_S = 60.0
"""A page that has requested no spans for this long gets no more; opening the view again helps."""


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


@contextlib.contextmanager
def cell_timeline(cluster: Cluster, ranks: Sequence[int], *, title: str) -> Iterator[None]:
    """Show the timeline of these ranks until the block is left; the view's errors are logged and never reach the cell.

    Args:
        cluster: Where the cell runs.
        ranks: Its ranks that run the cell.
        title: Text such as ``In [3]``.
    """
    cleanup = contextlib.ExitStack()
    try:
        _open(cluster, ranks, title, cleanup)
    except Exception:
        _log.warning("The timeline of the cell could not be shown.", exc_info=True)
    try:
        yield
    finally:
        try:
            cleanup.close()
        except Exception:
            _log.warning("The timeline of the cell could not be saved.", exc_info=True)


class _TextReader:
    """Stands in for a view if no widget can be shown: spans are recorded for the text at the end."""

    wanted = True

    def pump(self) -> None:
        """Show nothing while the cell runs."""


def _open(cluster: Cluster, ranks: Sequence[int], title: str, cleanup: contextlib.ExitStack) -> None:
    feed = cluster.spans
    feed.collect(timeout_s=1.0, watch_s=5.0)
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        reader, begin = _TextReader(), feed.store.end
        feed.open(reader)
        cleanup.callback(lambda: print(_text(feed, ranks, title, begin)))
        cleanup.callback(feed.collect, timeout_s=0.5)
        cleanup.callback(feed.close, reader)
        return
    view = TimelineView(feed, ranks, title=title, begin=feed.store.end, since_ns=time.monotonic_ns())
    handle = display(view, display_id=True)
    feed.open(view)

    def replace_by_picture() -> None:
        feed.close(view)
        feed.collect(timeout_s=0.5)
        view.finish()
        if handle is not None:
            handle.update(view.to_bundle(), raw=True)
        # The update does not reach a page that was opened while the cell ran: its view stays open.
        if not view.reopened:
            view.close()

    cleanup.callback(replace_by_picture)


def _text(feed: SpanFeed, ranks: Sequence[int], title: str, begin: int) -> str:
    return timeline_bundle(feed.store.table(begin), ranks, title=title)["text/plain"]


class SavedSpans:
    """The spans of a finished cell; read like a `SpanFeed` and its `SpanStore`, and never changed.

    Args:
        table: The spans of the cell.
        cell: Its name, and its start and end in nanoseconds of the notebook's monotonic clock.
    """

    def __init__(self, table: SpanTable, cell: tuple[str, int, int]) -> None:
        self._table = table
        self.last_cell = cell
        """As in `SpanStore.last_cell`: what a page shows at first."""
        self.running_since = None
        """As in `SpanFeed`: no cell runs."""
        self.first = 0
        self.lost = table.lost
        self.num_patched = 0
        self.num_read = 0
        """Number of spans that a view has read, to send them."""

    @property
    def store(self) -> SavedSpans:
        """Itself."""
        return self

    @property
    def end(self) -> int:
        """Number of spans."""
        return len(self._table)

    def table(self, start: int = 0, stop: int | None = None) -> SpanTable:
        """Return the spans with numbers from `start` up to but excluding `stop`."""
        low = min(max(start, 0), self.end)
        high = self.end if stop is None else min(max(stop, low), self.end)
        if stop is not None:  # otherwise facts are computed from all spans
            self.num_read = max(self.num_read, high)
        columns = {name: column[low:high] for name, column in self._table.columns.items()}
        return SpanTable(columns, self._table.labels, self._table.groups, low, self.lost, self._table.dropped)

    def ending_after(self, time_ns: int, start: int = 0) -> SpanTable:
        """Return all spans, as they end within the cell; see `SpanStore`."""
        return self.table(start)

    def patches(self, since: int) -> tuple[list[tuple[int, int, int]], int]:
        """Return none: the spans are complete."""
        return [], 0


class CellViews:
    """The views of one cell.

    Args:
        cluster: Where it ran.
        ranks: Its ranks that run the cell.
        title: Text such as ``In [3]``.
    """

    def __init__(self, cluster: Cluster, ranks: Sequence[int], title: str) -> None:
        self._ranks = list(ranks)
        self._title = title
        self._strip = RankStrip(ranks, title=title)
        self._watch = StateFeed(cluster.client, ranks, self._strip)
        self._feed: SpanFeed | None = None
        self._first = 0
        """The number that the cell's first span has in the feed's store."""
        self._time_ns = (0, 0)

    @property
    def watch(self) -> StateFeed:
        """What feeds the strip; it is passed to `Cluster.run`."""
        return self._watch

    @contextlib.contextmanager
    def live(self, cluster: Cluster) -> Iterator[None]:
        """Keep the views up to date until the block is left."""
        try:
            self._strip.start()
        except Exception:  # a view must not fail a cell
            _log.warning("The activity of the ranks could not be shown.", exc_info=True)
        with cell_timeline(cluster, self._ranks, title=self._title):
            feed, start_ns = cluster.spans, time.monotonic_ns()
            first = feed.store.end
            try:
                with self._watch:
                    yield
            finally:
                end_ns = time.monotonic_ns()
        self._feed, self._first, self._time_ns = feed, first, (start_ns, end_ns)

    def show(self) -> None:
        """Open both views again: widgets above their pictures in a notebook, text elsewhere."""
        spans = self._saved_spans()
        bundles = [self._strip.to_bundle()]
        if spans is not None:
            bundles.append(timeline_bundle(spans.table(), self._ranks, title=self._title))
        if not hasattr(get_ipython(), "kernel"):
            print("\n".join(bundle["text/plain"] for bundle in bundles))
            return
        display(_reopen(self._strip))
        if spans is not None:
            _show_timeline(spans, self._ranks, self._title)
        pictures = "".join(bundle["text/html"] for bundle in bundles)
        text = "\n".join(bundle["text/plain"] for bundle in bundles)
        display({"text/html": foldable(pictures), "text/plain": text}, raw=True)

    def _saved_spans(self) -> SavedSpans | None:
        """Return the cell's spans, as far as the notebook still has them."""
        if self._feed is None:
            return None
        self._feed.collect(timeout_s=_COLLECT_TIMEOUT_S)  # a busy rank may not have sent all when the cell ended
        table = self._feed.store.table(self._first).between(*self._time_ns)
        return SavedSpans(table, (self._title, *self._time_ns)) if len(table) else None


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
    with views.live(cluster):
        yield views


def _reopen(view: Any) -> Any:
    """Open a closed widget again, with its state; ipywidgets does not show closed ones."""
    if view.comm is None:
        vars(view).pop("_repr_mimebundle_", None)
        view._model_id = None  # the page no longer knows the old one
        view.open()
    return view


def _show_timeline(spans: SavedSpans, ranks: Sequence[int], title: str) -> None:
    feed: Any = spans
    view = TimelineView(feed, ranks, title=title)
    display(view)
    threading.Thread(target=_feed_page, args=(view, spans), name="axon_nb-saved-spans", daemon=True).start()


def _feed_page(view: Any, spans: SavedSpans) -> None:
    """Send a page all spans, a message at a time, as it acknowledges them."""
    try:
        deadline = time.monotonic() + _PAGE_TIMEOUT_S
        while spans.num_read < spans.end and time.monotonic() < deadline:
            time.sleep(_PUMP_INTERVAL_S)
            view.pump()
            if view.watched:
                deadline = time.monotonic() + _PAGE_TIMEOUT_S
        view.finish()
    except Exception:  # a view must not fail a cell
        _log.warning("A timeline could not be shown again.", exc_info=True)
