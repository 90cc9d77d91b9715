"""The timeline of `--watch`: of one cell, live while it runs, a picture and a table afterwards."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from IPython.core.getipython import get_ipython
from IPython.display import display

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.span_feed import SpanFeed, span_feed
from axon_nb.widgets.timeline import TimelineView
from axon_nb.widgets.timeline_page import timeline_bundle

__all__ = ["cell_timeline"]


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
    feed.collect(limit_s=1.0, watch_s=5.0)
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        reader, begin = _Reader(), feed.store.end
        feed.open(reader)
        undo.callback(lambda: print(_text(feed, ranks, title, begin)))
        undo.callback(feed.collect, limit_s=0.5)
        undo.callback(feed.close, reader)
        return
    view = TimelineView(feed, ranks, title=title, begin=feed.store.end)
    handle = display(view, display_id=True)
    feed.open(view)

    def freeze() -> None:
        feed.close(view)
        feed.collect(limit_s=0.5)
        view.finish()
        if handle is not None:
            handle.update(view.to_bundle(), raw=True)
        # A page that was opened while the cell ran is not reached by the update: its view lives on.
        if not view.reopened:
            view.close()

    undo.callback(freeze)


def _text(feed: SpanFeed, ranks: Sequence[int], title: str, begin: int) -> str:
    return timeline_bundle(feed.store.table(begin), ranks, title=title)["text/plain"]
