"""Opens views: a panel in a notebook, text elsewhere.

Each panel is open once per notebook and moves to where it was opened last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.session import current
from axon_nb.records.spans import Span
from axon_nb.widgets.html import foldable
from axon_nb.widgets.panel import Panel
from axon_nb.widgets.timeline.content import advice_bundle, require_advice
from axon_nb.widgets.timeline.page import timeline_bundle
from axon_nb.widgets.timeline.record import Timeline

if TYPE_CHECKING:
    from axon_nb.widgets.timeline.record import PlannedTimeline


def show_watch(cluster: Cluster) -> None:
    """Show the progress of the job: a panel in a notebook, text elsewhere."""
    from axon_nb.widgets.watch.view import WatchPanel

    _open(WatchPanel(cluster), "watch")


def show_memory(cluster: Cluster, names: Sequence[str]) -> None:
    """Show the ranks' memory by what uses it: a panel in a notebook, text elsewhere.

    Args:
        cluster: The cluster whose ranks are queried.
        names: Modules and optimizers of the ranks, by name; empty: all that their variables hold.

    Raises:
        UsageError: No rank has a module or optimizer of that name.
    """
    from axon_nb.widgets.memory.view import MemoryPanel

    _open(MemoryPanel(cluster, names), "memory", *names)


def show_shards(cluster: Cluster, names: Sequence[str], *, gradients: bool = False) -> None:
    """Show which rank holds which part of tensors: a panel in a notebook, text elsewhere.

    Args:
        cluster: The cluster whose ranks are queried.
        names: Modules, optimizers, tensors of the ranks, by name.
        gradients: Whether to show gradients, too.

    Raises:
        UsageError: No rank has a variable of that name with tensors.
    """
    from axon_nb.widgets.shards import ShardsPanel

    _open(ShardsPanel(cluster, names, gradients=gradients), "shards", *names)


def show_inside(cluster: Cluster, name: str) -> None:
    """Show a recording of `axon_nb.inside`: a picture that later cells redraw in a notebook, text elsewhere.

    Raises:
        UsageError: No rank has a recording of that name, or a cell is running.
    """
    from axon_nb.widgets.inside import InsidePanel

    _open(InsidePanel(cluster, name), "inside", name)


def show_timeline(cluster: Cluster, ranks: Sequence[int], *, cell: int | None = None) -> Timeline:
    """Show the ranks' spans, from now on and as far back as they are stored; each cluster has one panel.

    Args:
        cluster: The cluster.
        ranks: Which of its ranks.
        cell: Number of a finished cell to show instead.

    Raises:
        UsageError: Ranks have no spans of that cell.
    """
    timeline = Timeline(cluster, list(ranks), cell=cell)
    if cell is not None or _notebook_shell() is None:
        _show(timeline_bundle(timeline.table(), ranks, title=timeline.title))
    else:
        from axon_nb.widgets.timeline.view import TimelinePanel

        _open(TimelinePanel(cluster, list(ranks)), "timeline", id(cluster))
    return timeline


def show_advice(cluster: Cluster, ranks: Sequence[int], *, cell: int | None = None) -> None:
    """Show what would shorten a training step, and by how much, as a replay of the recorded steps says.

    Args:
        cluster: The cluster.
        ranks: Which of its ranks.
        cell: Number of a finished cell; None: the last one with training steps.

    Raises:
        UsageError: Ranks have no spans of that cell, or none of a training step.
    """
    found = require_advice(Timeline(cluster, list(ranks), cell=cell).table())
    _show(advice_bundle(found))


def show_planned(spans: Sequence[Span], title: str) -> PlannedTimeline:
    """Show the timeline of a planned program.

    Args:
        spans: The spans of one rank of each kind.
        title: What was planned.
    """
    from axon_nb.widgets.timeline.record import PlannedTimeline

    timeline = PlannedTimeline(spans, title)
    if _notebook_shell() is None:
        print(repr(timeline))
    else:
        display(timeline.view())
        bundle = timeline.bundle()
        display({**bundle, "text/html": foldable(bundle["text/html"])}, raw=True)
    return timeline


def compare_cells(cluster: Cluster, ranks: Sequence[int], cells: Sequence[int]) -> None:
    """Show two finished cells side by side, on one scale.

    Args:
        cluster: The cluster.
        ranks: Which of its ranks.
        cells: Numbers of the two cells.

    Raises:
        UsageError: Ranks have no spans of one of them.
    """
    from axon_nb.widgets.timeline.page import comparison_bundle

    timelines = [Timeline(cluster, list(ranks), cell=cell) for cell in cells]
    _show(comparison_bundle([(timeline.title, timeline.table()) for timeline in timelines], ranks))


def _notebook_shell() -> InteractiveShell | None:
    shell = get_ipython()
    return shell if hasattr(shell, "kernel") else None


def _show(bundle: dict[str, str]) -> None:
    if _notebook_shell() is None:
        print(bundle["text/plain"])
    else:
        display(bundle, raw=True)


def _open(panel: Panel, *key: object) -> None:
    """Show a panel in a notebook, in place of an earlier one; elsewhere print its picture as text."""
    shell = _notebook_shell()
    if shell is None:
        print(panel.picture()["text/plain"])
        return
    panels = current.session().panels
    earlier = panels.pop(key, None)
    if earlier is not None:
        earlier.close()
    panel.open(shell)
    panels[key] = panel
