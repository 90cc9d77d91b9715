"""The clusters that this notebook's previous kernel left running: reconnect to them on first use, or end them.

Nothing that is kept is ended unasked. A command that needs a cluster reconnects to the kept one. Only `start`, `stop`
and `restart` end it, and `start` refuses while a cell runs there (`discovery.raise_if_busy`).
"""

from __future__ import annotations

import contextlib

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.inspection.variables import PREDEFINED
from axon_nb.cluster.launch.connection import in_kernel
from axon_nb.cluster.rpc.requests import request_all
from axon_nb.cluster.session import current
from axon_nb.cluster.session.discovery import own_detached, running
from axon_nb.cluster.session.start import attach
from axon_nb.errors import NoClusterError, UsageError
from axon_nb.records.protocol.completion import NamesRequest

_TIMEOUT_S = 2.0
"""The control thread of a rank replies in milliseconds, unless C code holds the GIL or the process is stopped."""
_MAX_NAMES = 8
_MODULE = "builtins.module"


def require(command: str) -> Cluster:
    """Return the current cluster, or reconnect to the one that this notebook's previous kernel left running.

    Args:
        command: What needs it, such as ``%push``; named in the error.

    Raises:
        NoClusterError: there is none; the message names what other kernels left.
        UsageError: the notebook left several, or one of another version.
        ClusterLostError: it ended by itself.
    """
    cluster = current.get() or take_over()
    if cluster is None:
        current.session().raise_if_lost()
        raise NoClusterError(f"`{command}`", kept=_others())
    return cluster


def take_over() -> Cluster | None:
    """Reconnect to the cluster that this notebook's previous kernel left running; None if there is none.

    Raises:
        UsageError: there are several, or its ranks run another version.
        StartError: none of its ranks is alive.
    """
    if not in_kernel():  # a program that detaches says when it wants its cluster back
        return None
    kept = [entry for entry in own_detached() if entry.has_world]
    if not kept:
        return None
    if len(kept) > 1:
        raise UsageError(
            f"This notebook left several clusters running: {', '.join(repr(entry.name) for entry in kept)}. Run "
            "`%distributed attach NAME` to reconnect to one, or `%distributed start` to stop all and start new ranks."
        )
    cluster = attach(kept[0].name)
    print(
        f"Reconnected to the cluster {cluster.name!r} ({_count(cluster.world_size)}) that this notebook had left "
        f"running. {_holdings(cluster)}",
        flush=True,
    )
    return cluster


def _holdings(cluster: Cluster) -> str:
    """Say which variables the ranks hold."""
    replies = request_all(cluster.client, cluster.state.live_ranks, NamesRequest(), timeout_s=_TIMEOUT_S)
    names = {
        name: None
        for reply in replies.values()
        for name, known in reply.names.items()
        if name not in PREDEFINED and known.type != _MODULE
    }
    if not replies:
        return "`%distributed start` would stop it and start new ranks."
    if not names:
        return "Its ranks hold no variables."
    shown = [*names][-_MAX_NAMES:]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"Its ranks hold {', '.join(shown)}{more}."


def _others() -> str:
    """Name the detached clusters that another kernel left, as a sentence with the command; empty if there are none."""
    with contextlib.suppress(OSError):
        entries = [entry for entry in running() if entry.has_world and not entry.attached]
        if entries:
            listed = ", ".join(f"{entry.name!r} ({_count(entry.num_ranks)})" for entry in entries)
            return (
                f" Left running by another kernel: {listed}. Run `%distributed attach {entries[0].name}` to reconnect."
            )
    return ""


def _count(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"
