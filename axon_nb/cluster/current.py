"""The cluster that this notebook's cells run on."""

from __future__ import annotations

import atexit
import threading
from typing import TYPE_CHECKING

from axon_nb.cluster.settings import settings
from axon_nb.errors import NoClusterError

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster

__all__ = ["drop", "get", "put", "require"]

_lock = threading.Lock()
_current: list[Cluster] = []


def get() -> Cluster | None:
    """The current cluster; None when there is none or it has ended."""
    with _lock:
        return _current[0] if _current and _current[0].running else None


def require(command: str) -> Cluster:
    """The current cluster.

    Raises:
        NoClusterError: there is none.
    """
    cluster = get()
    if cluster is None:
        raise NoClusterError(f"`{command}`")
    return cluster


def put(cluster: Cluster) -> None:
    """Make `cluster` the current one; it ends with this process unless the kernel is being restarted."""
    from axon_nb.cluster import journal
    from axon_nb.cluster.lifecycle import at_exit, watch_shutdown

    journal.started(cluster.state)
    settings.running = get
    with _lock:
        _current[:] = [cluster]
    watch_shutdown(cluster)
    atexit.register(at_exit, cluster)


def drop(cluster: Cluster) -> None:
    """Forget `cluster`."""
    with _lock:
        if _current and _current[0] is cluster:
            _current.clear()
