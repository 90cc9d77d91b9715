"""The views of `--watch`: live while the cell runs, pictures afterwards, and opened again by `result.show()`."""

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
from axon_nb.cluster.span_feed import SpanFeed, span_feed
from axon_nb.cluster.watch import Watch
from axon_nb.widgets.kept_spans import KeptSpans
from axon_nb.widgets.strip import RankStrip
from axon_nb.widgets.timeline_cell import cell_timeline
from axon_nb.widgets.timeline_page import timeline_bundle

__all__ = ["CellViews", "cell_views"]

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
        self._watch = Watch(cluster.client, ranks, self._strip)
        self._feed: SpanFeed | None = None
        self._first = 0
        """The number that the cell's first span has in the feed's store."""
        self._time_ns = (0, 0)

    @property
    def watch(self) -> Watch:
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
        self._feed.collect(limit_s=_COLLECT_S)  # a busy rank may not have told all when the cell was over
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
    from axon_nb.widgets.timeline import TimelineView

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
