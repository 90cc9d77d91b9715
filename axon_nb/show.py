"""Views of the current cluster from Python; each magic such as `%shards` has its function here."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from axon_nb.errors import UsageError

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster
    from axon_nb.widgets.timeline_record import Timeline

__all__ = ["memory", "shards", "timeline", "watch"]


def shards(*names: str, gradients: bool = False, cluster: Cluster | None = None) -> None:
    """Show which rank holds which part of tensors, as `%shards` does.

    Args:
        *names: Modules, optimizers, tensors of the ranks, by name.
        gradients: Whether gradients are shown besides parameters.
        cluster: Whose ranks are asked; None: the current one.

    Raises:
        NoClusterError: none is running.
        UsageError: there is nothing of that name to show.
    """
    chosen = cluster or import_module("axon_nb.cluster.current").require("axon_nb.show.shards()")
    if not names:
        raise UsageError("axon_nb.show.shards() shows something of the ranks: give its name, such as 'model'.")
    import_module("axon_nb.widgets.open_panels").show_shards(chosen, _checked(names), gradients=gradients)


def memory(*names: str, cluster: Cluster | None = None) -> None:
    """Show what each rank's memory holds, as `%memory` does.

    Args:
        *names: Modules and optimizers of the ranks, by name; none: all that their variables hold.
        cluster: Whose ranks are asked; None: the current one.

    Raises:
        NoClusterError: none is running.
        UsageError: there is nothing of that name.
    """
    chosen = cluster or import_module("axon_nb.cluster.current").require("axon_nb.show.memory()")
    import_module("axon_nb.widgets.open_job").show_memory(chosen, _checked(names))


def _checked(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not isinstance(name, str):
            raise UsageError(
                f"a {type(name).__name__} of this notebook: what is shown is on the ranks; give its name there, "
                "such as 'model'."
            )
    return names


def timeline(
    *, ranks: str | Iterable[int] | None = None, cell: int | None = None, cluster: Cluster | None = None
) -> Timeline:
    """Show what each rank does, span by span, as `%timeline` does.

    Args:
        ranks: Which; numbers, or text such as ``0,2-3``; None: all.
        cell: Number of one cell that is over, to show alone.
        cluster: Whose ranks; None: the current one.

    Returns:
        The same to keep: `save` writes it as .json (a trace for Perfetto), .html or .csv, `to_dataframe` gives a table.

    Raises:
        NoClusterError: none is running.
        UsageError: there is no such rank, or ranks have no spans of that cell.
    """
    chosen = cluster or import_module("axon_nb.cluster.current").require("axon_nb.show.timeline()")
    rows = import_module("axon_nb.cluster.ranks").resolve_ranks(ranks, chosen.world_size)
    shown: Timeline = import_module("axon_nb.widgets.open_timeline").show_timeline(chosen, rows, cell=cell)
    return shown


def watch(*, cluster: Cluster | None = None) -> None:
    """Show what a job does, while it runs, as `%watch` does.

    Args:
        cluster: Whose ranks are asked; None: the current one.

    Raises:
        NoClusterError: none is running.
    """
    chosen = cluster or import_module("axon_nb.cluster.current").require("axon_nb.show.watch()")
    import_module("axon_nb.widgets.open_job").show_watch(chosen)
