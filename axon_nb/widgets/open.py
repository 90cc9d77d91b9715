"""Opening the panels of a running job: each is there once, and moves to where it was opened last.

The panels that follow a cluster: each is opened once for what it shows.

Showing a timeline: a panel in a notebook, text elsewhere; each cluster has one panel.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from IPython.core.getipython import get_ipython
from IPython.display import display

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.inspection.shards import request_layouts
from axon_nb.widgets.panel import FollowingPanel
from axon_nb.widgets.shards.page import shards_bundle
from axon_nb.widgets.shards.tensors import put_together
from axon_nb.widgets.timeline.page import timeline_bundle
from axon_nb.widgets.timeline.record import Timeline

__all__ = ["show_memory", "show_shards", "show_timeline", "show_watch"]

_job_panels: dict[tuple[str, ...], FollowingPanel] = {}


def show_watch(cluster: Cluster) -> None:
    """Show what the job does: a panel in a notebook, text elsewhere."""
    if not _in_notebook():
        from axon_nb.cluster.inspection.job import request_job
        from axon_nb.widgets.watch.page import watch_bundle
        from axon_nb.widgets.watch.store import JobStore

        store = JobStore()
        store.take(request_job(cluster.state, {}), time.monotonic())
        print(watch_bundle(store)["text/plain"])
        return
    from axon_nb.widgets.watch.view import WatchPanel

    _replace(("watch",), WatchPanel(cluster))


def show_memory(cluster: Cluster, names: Sequence[str]) -> None:
    """Show what the ranks' memory holds: a panel in a notebook, text elsewhere.

    Args:
        cluster: Whose ranks are asked.
        names: Modules and optimizers of the ranks, by name; empty: all that their variables hold.

    Raises:
        UsageError: there is nothing of that name.
    """
    if not _in_notebook():
        from axon_nb.cluster.inspection.memory import request_memory
        from axon_nb.widgets.memory.page import memory_bundle
        from axon_nb.widgets.memory.rows import MemoryRows

        rows = MemoryRows(", ".join(names))
        rows.take(request_memory(cluster.state, names))
        print(memory_bundle(rows)["text/plain"])
        return
    from axon_nb.widgets.memory.view import MemoryPanel

    _replace(("memory", *names), MemoryPanel(cluster, names))


def _in_notebook() -> bool:
    return hasattr(get_ipython(), "kernel")


def _replace(key: tuple[str, ...], panel: FollowingPanel) -> None:
    earlier = _job_panels.pop(key, None)
    if earlier is not None:
        earlier.close()
    shell = get_ipython()
    assert shell is not None
    panel.open(shell)
    _job_panels[key] = panel


_shards_panels: dict[tuple[str, ...], object] = {}


def show_shards(cluster: Cluster, names: Sequence[str], *, gradients: bool = False) -> None:
    """Show which rank holds which part of tensors: a panel in a notebook, text elsewhere.

    Args:
        cluster: Whose ranks are asked.
        names: Modules, optimizers, tensors of the ranks, by name.
        gradients: Whether gradients are shown besides parameters.

    Raises:
        UsageError: there is nothing of that name to show.
    """
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        shards, notes = request_layouts(cluster.state, names, gradients=gradients)
        print(shards_bundle(", ".join(names), put_together(shards), notes)["text/plain"])
        return
    from axon_nb.widgets.shards.view import ShardsPanel

    panel = ShardsPanel(cluster, names, gradients=gradients)
    earlier = _shards_panels.pop(tuple(names), None)
    if isinstance(earlier, ShardsPanel):
        earlier.close()
    panel.open(shell)
    _shards_panels[tuple(names)] = panel


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
    from axon_nb.widgets.timeline.panel import TimelinePanel

    panel = TimelinePanel(cluster, list(ranks))
    earlier = _timeline_panels.pop(cluster, None)
    if isinstance(earlier, TimelinePanel):
        earlier.close()
    panel.open(shell)
    _timeline_panels[cluster] = panel
    return timeline
