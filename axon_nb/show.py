"""Views of the current cluster from Python: one function for each magic such as `%shards`."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from axon_nb.errors import UsageError

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster
    from axon_nb.plan.program.run import ProgramPlan
    from axon_nb.widgets.timeline.record import Timeline

__all__ = ["inside", "memory", "shards", "timeline", "watch"]


def shards(*names: str, gradients: bool = False, cluster: Cluster | None = None) -> None:
    """Show which rank holds which part of tensors, as `%shards` does.

    Args:
        *names: Names of modules, optimizers or tensors on the ranks.
        gradients: Whether to show gradients besides parameters.
        cluster: The cluster; None for the current one.

    Raises:
        NoClusterError: none is running.
        UsageError: nothing with that name can be shown.
    """
    target = cluster or import_module("axon_nb.cluster.session.clusters").require("axon_nb.show.shards()")
    if not names:
        raise UsageError("axon_nb.show.shards() needs the name of a variable on the ranks, such as 'model'.")
    import_module("axon_nb.widgets.open").show_shards(target, _checked(names), gradients=gradients)


def memory(*names: str, cluster: Cluster | None = None) -> None:
    """Show each rank's memory use, as `%memory` does.

    Args:
        *names: Names of modules and optimizers on the ranks; default: all of them.
        cluster: The cluster; None for the current one.

    Raises:
        NoClusterError: none is running.
        UsageError: a name does not exist on the ranks.
    """
    target = cluster or import_module("axon_nb.cluster.session.clusters").require("axon_nb.show.memory()")
    import_module("axon_nb.widgets.open").show_memory(target, _checked(names))


def inside(name: str, cluster: Cluster | None = None) -> None:
    """Show what `axon_nb.inside` has recorded, as `%inside` does.

    Args:
        name: Name of a recording on the ranks.
        cluster: The cluster; None for the current one.

    Raises:
        NoClusterError: none is running.
        UsageError: no rank has such a recording, or a cell is running.
    """
    target = cluster or import_module("axon_nb.cluster.session.clusters").require("axon_nb.show.inside()")
    import_module("axon_nb.widgets.open").show_inside(target, *_checked((name,)))


def _checked(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not isinstance(name, str):
            raise UsageError(
                "expected the name of a variable on the ranks, such as 'model'; got an object of type "
                f"{type(name).__name__}."
            )
    return names


def timeline(
    planned: ProgramPlan | None = None,
    *,
    ranks: str | Iterable[int] | None = None,
    cell: int | None = None,
    cluster: Cluster | None = None,
) -> Timeline:
    """Show each rank's spans over time, as `%timeline` does.

    Args:
        planned: The result of `axon_nb.plan.run`: its ranks are shown instead of a cluster's, one of each kind.
        ranks: Numbers, or text such as ``0,2-3``; None for all.
        cell: Number of a finished cell, to show only that one.
        cluster: The cluster; None for the current one.

    Returns:
        The data: `save` writes .json (a trace for Perfetto), .html, .csv or .svg, `to_frame` returns a table.

    Raises:
        NoClusterError: none is running.
        UsageError: a rank does not exist, or there are no spans of that cell.
    """
    if planned is not None:
        drawn: Timeline = import_module("axon_nb.widgets.open").show_planned(planned.spans, planned.title)
        return drawn
    target = cluster or import_module("axon_nb.cluster.session.clusters").require("axon_nb.show.timeline()")
    rows = import_module("axon_nb.records.ranks").resolve_ranks(ranks, target.world_size)
    shown: Timeline = import_module("axon_nb.widgets.open").show_timeline(target, rows, cell=cell)
    return shown


def watch(*, cluster: Cluster | None = None) -> None:
    """Show a running job live, as `%watch` does.

    Args:
        cluster: The cluster; None for the current one.

    Raises:
        NoClusterError: none is running.
    """
    target = cluster or import_module("axon_nb.cluster.session.clusters").require("axon_nb.show.watch()")
    import_module("axon_nb.widgets.open").show_watch(target)
