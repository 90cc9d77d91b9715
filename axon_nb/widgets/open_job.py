"""Opening the panels of a running job: each is there once, and moves to where it was opened last."""

from __future__ import annotations

import time
from collections.abc import Sequence

from IPython.core.getipython import get_ipython

from axon_nb.cluster.cluster import Cluster
from axon_nb.widgets.following import FollowingPanel

__all__ = ["show_memory", "show_watch"]

_job_panels: dict[tuple[str, ...], FollowingPanel] = {}


def show_watch(cluster: Cluster) -> None:
    """Show what the job does: a panel in a notebook, text elsewhere."""
    if not _in_notebook():
        from axon_nb.cluster.job import ask_job
        from axon_nb.widgets.job_store import JobStore
        from axon_nb.widgets.watch_page import watch_bundle

        store = JobStore()
        store.take(ask_job(cluster.state, {}), time.monotonic())
        print(watch_bundle(store)["text/plain"])
        return
    from axon_nb.widgets.watch_panel import WatchPanel

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
        from axon_nb.cluster.memory import ask_memory
        from axon_nb.widgets.memory_page import memory_bundle
        from axon_nb.widgets.memory_rows import MemoryRows

        rows = MemoryRows(", ".join(names))
        rows.take(ask_memory(cluster.state, names))
        print(memory_bundle(rows)["text/plain"])
        return
    from axon_nb.widgets.memory_panel import MemoryPanel

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
