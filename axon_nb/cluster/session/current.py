"""The session of a notebook: the owner of its cluster, its settings and whatever else lasts from cell to cell.

A shutdown of the kernel stops the cluster; a restart leaves it running for the next kernel.

Private hook into ipykernel: only `Kernel.do_shutdown(restart)` says which of the two it is. If it is missing, a restart
counts as a shutdown.
"""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from axon_nb.cluster.cells.kernel_interrupts import KernelInterrupts
from axon_nb.cluster.cells.manager import CellManager
from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.history import History, session_facts
from axon_nb.cluster.launch.connection import Prewarm
from axon_nb.cluster.settings import IN_CLASS, LiveSettings
from axon_nb.compat.environment import after_import, keep_children
from axon_nb.errors import ClusterLostError, NoClusterError
from axon_nb.records.environment import CLASS, WARM_UP
from axon_nb.records.hooks import missing_hooks

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState


class AutoMode(Struct):
    """Whether plain cells run on ranks; set by `%distributed auto`."""

    on: bool = False
    ranks: str | None = None
    """The ranks, as for `--ranks`; None: all."""


class OpenPanel(Protocol):
    """A view that stays open after its cell: `axon_nb.widgets.panel.Panel`."""

    def close(self) -> None:
        """Stop updating it; what is shown stays."""


class LoadedExtension(Protocol):
    """What `%load_ext axon_nb` has added to the shell: `axon_nb.magics.extension.Extension`."""

    def uninstall(self) -> None:
        """Remove it."""


class NotebookSession:
    """What belongs to one notebook, or to a program that starts clusters."""

    def __init__(self) -> None:
        shared = CLASS.is_enabled()
        warm_up = WARM_UP.is_enabled() and not shared
        self.settings = LiveSettings(**(IN_CLASS if shared else {}), warm_up=warm_up)
        """What `%distributed config` shows and changes."""
        self.settings.running = self._running_state
        self.history = History()
        self.interrupts = KernelInterrupts()
        self.prewarm = Prewarm()
        """Starts a host agent before ranks are needed."""
        self.extension: LoadedExtension | None = None
        """What `%load_ext axon_nb` has added to the shell; None if it is not loaded."""
        self.auto = AutoMode()
        self.fetched: dict[str, Callable[[object], bool]] = {}
        """By name that `%pull` or `%gather` bound: whether a value is the one that they bound."""
        self.records: dict[object, Mapping[str, Any]] = {}
        """By id of a request, the record of the cell that it ran, until its reply takes it along."""
        self.panels: weakref.WeakValueDictionary[tuple[object, ...], OpenPanel] = weakref.WeakValueDictionary()
        """Open panels, by what they show. The shell's events keep a panel alive until it is closed."""
        self._lock = threading.Lock()
        self._cluster: Cluster | None = None
        self._clusters: weakref.WeakSet[Cluster] = weakref.WeakSet()
        """Those whose cells a restart of the kernel leaves running."""
        self._watches_shutdown = False
        self._restarting = False
        """Whether the kernel is shutting down in order to restart."""
        after_import("memory_profiler", keep_children)  # the host agent is a child

    @property
    def cluster(self) -> Cluster | None:
        """The current cluster; None if there is none, or it is no longer running."""
        with self._lock:
            return self._cluster if self._cluster is not None and self._cluster.running else None

    def _running_state(self) -> ClusterState | None:
        return None if (cluster := self.cluster) is None else cluster.state

    @property
    def loss(self) -> str:
        """How the last cluster ended, if nobody stopped it and no other has been started since; else empty."""
        with self._lock:
            state = self._cluster.state if self._cluster is not None else None
        if state is None or not state.health.lost_when:
            return ""
        health, kept = (
            state.health,
            ", not even by `protect`, which needs the host agent" if self.settings.protect else "",
        )
        deaths = "".join(f" Rank {rank} {reason}." for rank, reason in sorted(health.dead.items()))
        ranks = "its rank" if state.world_size == 1 else f"its {state.world_size} ranks"
        return (
            f"The cluster {state.name!r} {health.disconnect_reason} {health.lost_when}.{deaths} Nothing of {ranks} is "
            f"kept{kept}."
        )

    def raise_if_lost(self) -> None:
        """Refuse to replace a cluster in silence.

        Raises:
            ClusterLostError: the last one ended by itself.
        """
        if (loss := self.loss) and self._cluster is not None:
            raise ClusterLostError(f"{loss} Run `%distributed start -n {self._cluster.world_size}` to start new ones.")

    def require(self, command: str) -> Cluster:
        """Return the current cluster.

        Args:
            command: What needs it, such as ``%push``; named in the error.

        Raises:
            NoClusterError: there is none.
            ClusterLostError: it ended by itself.
        """
        cluster = self.cluster
        if cluster is None:
            self.raise_if_lost()
            raise NoClusterError(f"`{command}`")
        return cluster

    def new_cluster(self, state: ClusterState) -> Cluster:
        """Return the cluster with this state; `put` makes it the current one."""
        return Cluster(state, CellManager(state, self.settings, self.interrupts), self.history)

    def put(self, cluster: Cluster) -> None:
        """Make `cluster` the current one; it is stopped with this process unless the kernel is being restarted."""
        self.history.record_start(session_facts(cluster.state))
        with self._lock:
            self._cluster = cluster
        self._clusters.add(cluster)
        self.watch_shutdown()
        atexit.register(self._at_exit, cluster)

    def drop(self, cluster: Cluster | None = None) -> None:
        """Forget `cluster`; None: whichever is the last."""
        with self._lock:
            if cluster is None or self._cluster is cluster:
                self._cluster = None

    def watch_shutdown(self) -> None:
        """Watch for the kernel's shutdown request; safe to call again, and without a kernel."""
        app = sys.modules.get("ipykernel.kernelapp")
        if self._watches_shutdown or app is None or not app.IPKernelApp.initialized():
            return
        kernel = app.IPKernelApp.instance().kernel
        self._watches_shutdown = True
        if missing_hooks("session.shutdown", kernel=kernel):
            return
        original = kernel.do_shutdown

        def do_shutdown(restart: bool) -> Any:
            self._restarting = bool(restart)
            for cluster in list(self._clusters) if restart else ():
                cluster.leave_cells()  # Jupyter has interrupted the running cell; that was not meant for the ranks
            return original(restart)

        kernel.do_shutdown = do_shutdown

    def _at_exit(self, cluster: Cluster) -> None:
        """Detach from the cluster if the kernel is restarting, else stop it."""
        self.prewarm.discard()
        if not cluster.running:
            return
        if self._restarting:
            cluster.detach()
        else:
            cluster.stop()


_session = [NotebookSession()]


def session() -> NotebookSession:
    """The session of this process: what users call, such as `axon_nb.start` and the magics, acts on it."""
    return _session[0]


def set_session(notebook: NotebookSession) -> None:
    """Make `notebook` the session of this process."""
    _session[:] = [notebook]


def get() -> Cluster | None:
    """Return the current cluster; None if there is none, or it is no longer running."""
    return session().cluster


def require(command: str) -> Cluster:
    """Return the current cluster.

    Args:
        command: What needs it, such as ``%push``; named in the error.

    Raises:
        NoClusterError: there is none.
    """
    return session().require(command)
