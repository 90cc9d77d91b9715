"""The views of `--watch`: live while the cell runs, pictures afterwards, and opened again by `result.show()`.

The timeline of `--watch`: of one cell, live while it runs, a picture and a table afterwards.

The spans of one cell that is over, to be shown again: read as a feed and its store are, and never changed.
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
from axon_nb.cluster.inspection.span_feed import SpanFeed, span_feed
from axon_nb.cluster.inspection.span_table import SpanTable
from axon_nb.cluster.inspection.telemetry import StateFeed
from axon_nb.widgets.cell.strip import RankStrip
from axon_nb.widgets.timeline.page import timeline_bundle
from axon_nb.widgets.timeline.view import TimelineView

__all__ = ["CellViews", "KeptSpans", "cell_timeline", "cell_views"]


@contextlib.contextmanager
def cell_timeline(cluster: Cluster, ranks: Sequence[int], *, title: str) -> Iterator[None]:
    """Show what these ranks do until the block is left; what goes wrong with the view never reaches the cell."""
    undo = contextlib.ExitStack()
    try:
        _open(cluster, ranks, title, undo)
    except Exception:
        logging.getLogger(__name__).warning("The timeline of the cell could not be shown.", exc_info=True)
    try:
        yield
    finally:
        try:
            undo.close()
        except Exception:
            logging.getLogger(__name__).warning("The timeline of the cell could not be kept.", exc_info=True)


class _Reader:
    """What stands for a view where no widget can be shown: spans are recorded for the text at the end."""

    wanted = True

    def pump(self) -> None:
        """Nothing is shown meanwhile."""


def _open(cluster: Cluster, ranks: Sequence[int], title: str, undo: contextlib.ExitStack) -> None:
    feed = span_feed(cluster.state)
    feed.collect(timeout_s=1.0, watch_s=5.0)
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        reader, begin = _Reader(), feed.store.end
        feed.open(reader)
        undo.callback(lambda: print(_text(feed, ranks, title, begin)))
        undo.callback(feed.collect, timeout_s=0.5)
        undo.callback(feed.close, reader)
        return
    view = TimelineView(feed, ranks, title=title, begin=feed.store.end)
    handle = display(view, display_id=True)
    feed.open(view)

    def freeze() -> None:
        feed.close(view)
        feed.collect(timeout_s=0.5)
        view.finish()
        if handle is not None:
            handle.update(view.to_bundle(), raw=True)
        # A page that was opened while the cell ran is not reached by the update: its view lives on.
        if not view.reopened:
            view.close()

    undo.callback(freeze)


def _text(feed: SpanFeed, ranks: Sequence[int], title: str, begin: int) -> str:
    return timeline_bundle(feed.store.table(begin), ranks, title=title)["text/plain"]


class KeptSpans:
    """Stands for a `SpanFeed` and its `SpanStore` where nothing new comes.

    Args:
        table: The spans of the cell.
        cell: Its name, and its start and end in nanoseconds of the notebook's monotonic clock.
    """

    def __init__(self, table: SpanTable, cell: tuple[str, int, int]) -> None:
        self._table = table
        self.last_cell = cell
        """As `SpanStore.last_cell`: what a page shows by itself."""
        self.running_since = None
        """As in `SpanFeed`: no cell runs of which this shows anything."""
        self.first = 0
        self.lost = table.lost
        self.num_patched = 0
        self.taken = 0
        """How far they were asked for, to be sent."""

    @property
    def store(self) -> KeptSpans:
        """It is its own."""
        return self

    @property
    def end(self) -> int:
        """Number of spans."""
        return len(self._table)

    def table(self, start: int = 0, stop: int | None = None) -> SpanTable:
        """The spans with numbers from `start` to `stop`, without it."""
        low = min(max(start, 0), self.end)
        high = self.end if stop is None else min(max(stop, low), self.end)
        if stop is not None:  # else it is for facts about all of them
            self.taken = max(self.taken, high)
        columns = {name: column[low:high] for name, column in self._table.columns.items()}
        return SpanTable(columns, self._table.labels, self._table.groups, low, self.lost, self._table.dropped)

    def ending_after(self, time_ns: int, start: int = 0) -> SpanTable:
        """As in `SpanStore`."""
        return self.table(start)

    def patches(self, since: int) -> tuple[list[tuple[int, int, int]], int]:
        """None: all is known of each span already."""
        return [], 0


_PUMP_S = 0.1
_COLLECT_S = 1.0
_PATIENCE_S = 60.0
"""A page that has not asked for spans within so long shows none; opening the view again helps."""
_log = logging.getLogger(__name__)


class CellViews:
    """What was shown of one cell.

    Args:
        cluster: Where it ran.
        ranks: On which of its ranks.
        title: Such as ``In [3]``.
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
        """What feeds the strip; `Cluster.run` is given it."""
        return self._watch

    @contextlib.contextmanager
    def live(self, cluster: Cluster) -> Iterator[None]:
        """Within it the views move."""
        try:
            self._strip.start()
        except Exception:  # a view is never worth a cell
            _log.warning("What ranks do could not be shown.", exc_info=True)
        with cell_timeline(cluster, self._ranks, title=self._title):
            feed, start_ns = span_feed(cluster.state), time.monotonic_ns()
            first = feed.store.end
            try:
                with self._watch:
                    yield
            finally:
                end_ns = time.monotonic_ns()
        self._feed, self._first, self._time_ns = feed, first, (start_ns, end_ns)

    def show(self) -> None:
        """Open both views anew, to look into: a widget each in a notebook, with a folded picture; text elsewhere."""
        kept = self._kept()
        bundles = [self._strip.to_bundle()]
        if kept is not None:
            bundles.append(timeline_bundle(kept.table(), self._ranks, title=self._title))
        if not hasattr(get_ipython(), "kernel"):
            print("\n".join(bundle["text/plain"] for bundle in bundles))
            return
        display(_reopened(self._strip))
        if kept is not None:
            _show_timeline(kept, self._ranks, self._title)
        summary = "the same as pictures, which stay in the saved notebook"
        pictures = "".join(bundle["text/html"] for bundle in bundles)
        text = "\n".join(bundle["text/plain"] for bundle in bundles)
        html = f"<details><summary>{summary}</summary>{pictures}</details>"
        display({"text/html": html, "text/plain": text}, raw=True)

    def _kept(self) -> KeptSpans | None:
        """The cell's spans, as far as the notebook still has them."""
        if self._feed is None:
            return None
        self._feed.collect(timeout_s=_COLLECT_S)  # a busy rank may not have told all when the cell was over
        table = self._feed.store.table(self._first).between(*self._time_ns)
        return KeptSpans(table, (self._title, *self._time_ns)) if len(table) else None


@contextlib.contextmanager
def cell_views(cluster: Cluster, ranks: Sequence[int], *, title: str) -> Iterator[CellViews | None]:
    """Show what these ranks do until the block is left.

    Args:
        cluster: Where the cell runs.
        ranks: On which of its ranks.
        title: Such as ``In [3]``.

    Yields:
        The views; None where they could not be made, which is logged and never reaches the cell.
    """
    try:
        views = CellViews(cluster, ranks, title)
    except Exception:
        _log.warning("What ranks do could not be shown.", exc_info=True)
        yield None
        return
    with views.live(cluster):
        yield views


def _reopened(view: Any) -> Any:
    """A widget that was closed, with its state, as new: ipywidgets keeps a closed one from being shown."""
    if view.comm is None:
        vars(view).pop("_repr_mimebundle_", None)
        view._model_id = None  # the page has forgotten the one of before
        view.open()
    return view


def _show_timeline(kept: KeptSpans, ranks: Sequence[int], title: str) -> None:
    from axon_nb.widgets.timeline.view import TimelineView

    feed: Any = kept
    view = TimelineView(feed, ranks, title=title)
    display(view)
    threading.Thread(target=_feed_page, args=(view, kept), name="axon_nb-shown", daemon=True).start()


def _feed_page(view: Any, kept: KeptSpans) -> None:
    """Send a page all spans, a message at a time, as it confirms them."""
    try:
        end = time.monotonic() + _PATIENCE_S
        while kept.taken < kept.end and time.monotonic() < end:
            time.sleep(_PUMP_S)
            view.pump()
            if view.watched:
                end = time.monotonic() + _PATIENCE_S
        view.finish()
    except Exception:  # a view is never worth a cell
        _log.warning("A timeline could not be shown again.", exc_info=True)
