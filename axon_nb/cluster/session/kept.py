"""The clusters that this notebook's previous kernel left running: reconnect to them on first use, or end them.

Nothing that is kept is ended unasked. A command that needs a cluster reconnects to the kept one. Only `start` and
`stop` end it, and `start` refuses while a cell runs there.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import TYPE_CHECKING

from axon_nb.cluster.launch.connection import in_kernel, open_existing
from axon_nb.cluster.rpc.requests import request_all
from axon_nb.cluster.session.discovery import ClusterEntry, own_detached, running
from axon_nb.errors import StartError, UsageError
from axon_nb.records.protocol.cells import CellsRequest
from axon_nb.records.protocol.completion import NamesRequest
from axon_nb.records.protocol.version import refuse_attach
from axon_nb.records.ranks import name_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster

__all__ = ["others", "raise_if_busy", "take_over"]

_TIMEOUT_S = 2.0
"""The control thread of a rank replies in milliseconds, unless C code holds the GIL or the process is stopped."""
_REGISTRATION_TIMEOUT_S = 5.0
_MAX_NAMES = 8
_NOT_HELD = {
    "In",
    "Out",
    "device",
    "dist",
    "exit",
    "get_ipython",
    "local_rank",
    "mesh",
    "open",
    "quit",
    "rank",
    "torch",
}
_NOT_HELD |= {"world", "world_size"}
"""What every rank has without a cell."""
_MODULE = "builtins.module"


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
    cluster: Cluster = import_module("axon_nb.cluster.session.start").attach(kept[0].name)
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
        if name not in _NOT_HELD and known.type != _MODULE
    }
    if not replies:
        return "`%distributed start` would stop it and start new ranks."
    if not names:
        return "Its ranks hold no variables."
    shown = [*names][-_MAX_NAMES:]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"Its ranks hold {', '.join(shown)}{more}."


def others() -> str:
    """Name the detached clusters that another kernel left, as a sentence with the command; empty if there are none."""
    with contextlib.suppress(OSError):
        entries = [entry for entry in running() if entry.has_world and not entry.attached]
        if entries:
            listed = ", ".join(f"{entry.name!r} ({_count(entry.num_ranks)})" for entry in entries)
            return (
                f" Left running by another kernel: {listed}. Run `%distributed attach {entries[0].name}` to reconnect."
            )
    return ""


def raise_if_busy() -> None:
    """Refuse to end a kept cluster in which a cell runs.

    Raises:
        UsageError: a cell runs there, or a rank does not say.
    """
    for entry in own_detached():
        if entry.has_world and not refuse_attach(entry.name, entry.version):
            busy = _busy_ranks(entry)
            if busy:
                raise UsageError(
                    f"A cell is still running on {name_ranks(busy)} of the cluster {entry.name!r}, which this notebook "
                    "had left running. Run `%distributed attach` to get it back, or `%distributed start --force` to "
                    "stop it and start new ranks."
                )


def _busy_ranks(entry: ClusterEntry) -> list[int]:
    try:
        connection = open_existing(entry.run_dir)
    except (StartError, OSError):  # it is ending
        return []
    try:
        forked = set(connection.agent.hello_reply.ranks) - set(connection.agent.exits)
        alive = forked or set(range(entry.num_ranks))  # other launchers
        connection.client.wait_registered(alive, _REGISTRATION_TIMEOUT_S)
        asked = [rank for rank in sorted(alive) if rank in connection.client.registered]
        replies = request_all(connection.client, asked, CellsRequest(), timeout_s=_TIMEOUT_S)
        return [rank for rank in asked if rank not in replies or replies[rank].running]
    finally:
        connection.close()


def _count(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"
