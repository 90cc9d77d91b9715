"""Distributed PyTorch in a notebook: `%load_ext axon_nb`, then `%%distributed` cells run on persistent ranks.

Importing this package loads nothing else: each public name is imported from its module on first use, so that a
notebook does not wait for torch and a rank never loads the widgets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from axon_nb._version import __version__

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

_NAMES_BY_MODULE = {
    "axon_nb.cluster": ("CellResult", "Cluster", "attach", "start"),
    "axon_nb.comm.calls": ("calls",),
    "axon_nb.engine.elastic.resize": ("on_resize",),
    "axon_nb.errors": (
        "AxonError",
        "CellError",
        "CellInterrupt",
        "CellTimeoutError",
        "ClusterLostError",
        "NoClusterError",
        "StartError",
        "UsageError",
    ),
    "axon_nb.records.training.job": ("log", "progress"),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use, and cache it."""
    if name == "show":
        return import_module("axon_nb.show")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List all public names, including those not imported yet."""
    return sorted(__all__)


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
