"""The views of `--watch`: an activity strip and a timeline of one cell.

They are live while the cell runs and pictures with a table afterwards; `result.show()` opens them again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.inspection.span_feed import SpanFeed
from axon_nb.cluster.inspection.span_table import SpanTable
from axon_nb.cluster.inspection.telemetry import StateFeed
from axon_nb.widgets.cell.strip import RankStrip
from axon_nb.widgets.html import folded
from axon_nb.widgets.timeline.page import timeline_bundle
from axon_nb.widgets.timeline.view import TimelineView

_log = logging.getLogger(__name__)
_PUMP_INTERVAL_S = 0.1
_COLLECT_TIMEOUT_S = 1.0
_PAGE_TIMEOUT_S = 60.0
"""A page that has requested no spans for this long gets no more; opening the view again helps."""


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
    view = TimelineView(feed, ranks, title=title, begin=feed.store.end)
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
        """Open both views again: widgets with a folded picture in a notebook, text elsewhere."""
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
        html = folded(pictures, summary="the same as pictures, which stay in the saved notebook")
        display({"text/html": html, "text/plain": text}, raw=True)

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
