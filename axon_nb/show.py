"""Views of the current cluster from Python; each magic such as `%shards` has its function here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster

__all__ = ["memory", "shards", "watch"]


def shards(*names: str, gradients: bool = False, cluster: Cluster | None = None) -> None:
    """Show which rank holds which part of tensors, as `%shards` does.

    Args:
        *names: Modules, optimizers, tensors of the ranks, by name.
        gradients: Whether gradients are shown besides parameters.
        cluster: Whose ranks are asked; None: the current one.

    Raises:
        NoCluster: none is running.
        UsageError: there is nothing of that name to show.
    """
    chosen = cluster or import_module("axon_nb.cluster.current").require("axon_nb.show.shards()")
    import_module("axon_nb.widgets.open_panels").show_shards(chosen, names, gradients=gradients)


def memory(*names: str, cluster: Cluster | None = None) -> None:
    """Show what each rank's memory holds, as `%memory` does.

    Args:
        *names: Modules and optimizers of the ranks, by name; none: all that their variables hold.
        cluster: Whose ranks are asked; None: the current one.

    Raises:
        NoCluster: none is running.
        UsageError: there is nothing of that name.
    """
    chosen = cluster or import_module("axon_nb.cluster.current").require("axon_nb.show.memory()")
    import_module("axon_nb.widgets.open_job").show_memory(chosen, names)


def watch(*, cluster: Cluster | None = None) -> None:
    """Show what a job does, while it runs, as `%watch` does.

    Args:
        cluster: Whose ranks are asked; None: the current one.

    Raises:
        NoCluster: none is running.
    """
    chosen = cluster or import_module("axon_nb.cluster.current").require("axon_nb.show.watch()")
    import_module("axon_nb.widgets.open_job").show_watch(chosen)
