"""The cluster that this notebook's cells run on, and what happens to it when the kernel exits.

A shutdown of the kernel stops the cluster; a restart leaves it running for the next kernel.

Private hook into ipykernel: only `Kernel.do_shutdown(restart)` says which of the two it is. If it is missing, a restart
counts as a shutdown.
"""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.launch import prewarm
from axon_nb.cluster.settings import settings
from axon_nb.errors import NoClusterError
from axon_nb.records.hooks import missing_hooks

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster

__all__ = ["at_exit", "drop", "get", "put", "require", "restarting", "watch_shutdown"]

_lock = threading.Lock()
_current: list[Cluster] = []


def get() -> Cluster | None:
    """Return the current cluster; None if there is none, or it is no longer running."""
    with _lock:
        return _current[0] if _current and _current[0].running else None


def require(command: str) -> Cluster:
    """Return the current cluster.

    Args:
        command: What needs it, such as ``%push``; named in the error.

    Raises:
        NoClusterError: there is none.
    """
    cluster = get()
    if cluster is None:
        raise NoClusterError(f"`{command}`")
    return cluster


def put(cluster: Cluster) -> None:
    """Make `cluster` the current one; it is stopped with this process unless the kernel is being restarted."""
    from axon_nb.cluster import history

    history.record_start(cluster.state)
    settings.running = lambda: None if (running := get()) is None else running.state
    with _lock:
        _current[:] = [cluster]
    watch_shutdown(cluster)
    atexit.register(at_exit, cluster)


def drop(cluster: Cluster) -> None:
    """Forget `cluster`."""
    with _lock:
        if _current and _current[0] is cluster:
            _current.clear()


_state = {"restart": False, "installed": False}
_clusters: weakref.WeakSet[Cluster] = weakref.WeakSet()


def restarting() -> bool:
    """Whether the kernel is shutting down in order to restart."""
    return _state["restart"]


def watch_shutdown(cluster: Cluster | None = None) -> None:
    """Watch for the kernel's shutdown request, also for `cluster`; safe to call again, and without a kernel."""
    if cluster is not None:
        _clusters.add(cluster)
    app = sys.modules.get("ipykernel.kernelapp")
    if _state["installed"] or app is None or not app.IPKernelApp.initialized():
        return
    kernel = app.IPKernelApp.instance().kernel
    _state["installed"] = True
    if missing_hooks("session.shutdown", kernel=kernel):
        return
    original = kernel.do_shutdown

    def do_shutdown(restart: bool) -> Any:
        _state["restart"] = bool(restart)
        for own in list(_clusters) if restart else ():
            own.leave_cells()  # Jupyter has interrupted the running cell; that was not meant for the ranks
        return original(restart)

    kernel.do_shutdown = do_shutdown


def at_exit(cluster: Cluster) -> None:
    """Detach from the cluster if the kernel is restarting, else stop it; called at interpreter exit."""
    prewarm.discard()
    if not cluster.running:
        return
    if restarting():
        cluster.detach()
    else:
        cluster.stop()
