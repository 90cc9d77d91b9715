"""The slot that holds the session of this process, and its current cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from axon_nb.cluster.session.notebook import NotebookSession

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster

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
