"""Showing a timeline: a panel in a notebook, text elsewhere; each cluster has one panel."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from IPython.core.getipython import get_ipython
from IPython.display import display

from axon_nb.cluster.cluster import Cluster
from axon_nb.widgets.timeline_page import timeline_bundle
from axon_nb.widgets.timeline_record import Timeline

__all__ = ["show_timeline"]

_timeline_panels: WeakKeyDictionary[Cluster, object] = WeakKeyDictionary()


def show_timeline(cluster: Cluster, ranks: Sequence[int], *, cell: int | None = None) -> Timeline:
    """Show what ranks do, from now on and as far back as they have kept it.

    Args:
        cluster: The cluster.
        ranks: Which of its ranks.
        cell: Show one cell that is over instead.

    Raises:
        UsageError: ranks have no spans of that cell.
    """
    timeline = Timeline(cluster, list(ranks), cell=cell)
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        print(repr(timeline))
        return timeline
    if cell is not None:
        display(timeline_bundle(timeline.table(), ranks, title=timeline.title), raw=True)
        return timeline
    from axon_nb.widgets.timeline_panel import TimelinePanel

    panel = TimelinePanel(cluster, list(ranks))
    earlier = _timeline_panels.pop(cluster, None)
    if isinstance(earlier, TimelinePanel):
        earlier.close()
    panel.open(shell)
    _timeline_panels[cluster] = panel
    return timeline
