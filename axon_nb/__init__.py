"""Distributed PyTorch in a notebook: `%load_ext axon_nb`, then `%%distributed` cells run on persistent ranks.

Importing this package loads nothing else: each public name is imported from its module on first use, so that a
notebook does not wait for torch and a rank never loads the widgets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from axon_nb._version import __version__
from axon_nb.lazy import lazy_names

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from axon_nb import show
    from axon_nb.cluster.cells.result import CellResult
    from axon_nb.cluster.cluster import Cluster
    from axon_nb.cluster.session.clusters import attach, start
    from axon_nb.comm.calls import calls
    from axon_nb.engine.elastic.resize import on_resize
    from axon_nb.errors import (
        AxonError,
        CellError,
        CellInterrupt,
        CellTimeoutError,
        ClusterLostError,
        NoClusterError,
        StartError,
        UsageError,
    )
    from axon_nb.records.training.job import log, progress

__all__ = [
    "AxonError",
    "CellError",
    "CellInterrupt",
    "CellResult",
    "CellTimeoutError",
    "Cluster",
    "ClusterLostError",
    "NoClusterError",
    "StartError",
    "UsageError",
    "__version__",
    "attach",
    "calls",
    "current_cluster",
    "load_ipython_extension",
    "log",
    "on_resize",
    "progress",
    "show",
    "start",
    "unload_ipython_extension",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "cluster": "CellResult Cluster attach start",
        "comm.calls": "calls",
        "engine.elastic.resize": "on_resize",
        "errors": "AxonError CellError CellInterrupt CellTimeoutError ClusterLostError NoClusterError StartError "
        "UsageError",
        "records.training.job": "log progress",
        "show": "show",
    },
)


def current_cluster() -> Cluster:
    """Return the cluster that runs this process's cells.

    Raises:
        NoClusterError: none is running.
    """
    cluster: Cluster = import_module("axon_nb.cluster.session.clusters").require("axon_nb.current_cluster()")
    return cluster


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register `%distributed`, `%%distributed` and the other magics: `%load_ext axon_nb`."""
    import_module("axon_nb.magics").load_ipython_extension(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Unregister the magics: `%unload_ext axon_nb`."""
    import_module("axon_nb.magics").unload_ipython_extension(ipython)
