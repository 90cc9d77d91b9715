"""Find, list and stop clusters of this user, such as those that outlived their kernel."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from axon_nb.cluster.launch.connection import kernel_id, open_existing
from axon_nb.cluster.rpc.requests import request_all
from axon_nb.errors import StartError, UsageError
from axon_nb.host.query import AgentQuery
from axon_nb.host.run_dir import RunDir, list_run_dirs
from axon_nb.records.protocol.agent import GetInfo, Stop
from axon_nb.records.protocol.cells import CellsRequest
from axon_nb.records.protocol.version import Version, read_version, refuse_attach
from axon_nb.records.ranks import name_ranks

_REPLY_TIMEOUT_S = 60.0
"""On a busy machine an agent may take a while to reply."""
_STOP_TIMEOUT_S = 10.0
_RANK_TIMEOUT_S = 2.0
"""The control thread of a rank replies in milliseconds, unless C code holds the GIL or the process is stopped."""
_REGISTRATION_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ClusterEntry:
    """A running cluster of this user, in whichever notebook it is used."""

    run_dir: RunDir
    name: str
    num_ranks: int
    owner: str
    attached: bool
    """Whether a notebook is connected."""
    has_world: bool
    """Whether its ranks have joined a world; False for engines that a program started through ipyparallel."""
    version: Version
    """What its ranks run."""


def running() -> list[ClusterEntry]:
    """Return all clusters of this user that have ranks."""
    entries = []
    for run_dir in list_run_dirs():
        info = run_dir.read_info()
        if info.get("world_size"):
            attached = _attached(run_dir)
            entries.append(
                ClusterEntry(
                    run_dir,
                    info["name"],
                    int(info["world_size"]),
                    info.get("owner", ""),
                    attached,
                    has_world=bool(info.get("layout")),
                    version=read_version(info.get("version")),
                )
            )
    return entries


def _attached(run_dir: RunDir) -> bool:
    with contextlib.suppress(OSError, ValueError), AgentQuery(run_dir, timeout_s=_REPLY_TIMEOUT_S) as agent:
        return bool(agent.request(GetInfo()).get("attached"))
    return False


def own_detached() -> list[ClusterEntry]:
    """Return the detached clusters that this notebook's previous kernel left running."""
    kernel = kernel_id()
    return [entry for entry in running() if entry.owner == kernel and not entry.attached]


def stop_detached() -> list[str]:
    """Stop the clusters that this notebook's previous kernel left running; return a line for each."""
    lines = []
    for entry in own_detached():
        with contextlib.suppress(OSError, ValueError), AgentQuery(entry.run_dir, timeout_s=_REPLY_TIMEOUT_S) as agent:
            agent.request(Stop())  # agents of all versions know this command
            agent.wait_closed(_STOP_TIMEOUT_S)
            lines.append(
                f"Stopped the cluster {entry.name!r} ({entry.num_ranks} rank{'s' * (entry.num_ranks != 1)}) that this "
                "notebook had left running."
            )
    return lines


def find(name: str | None) -> ClusterEntry:
    """Return the cluster to attach to.

    Args:
        name: Its name; None: this notebook's own, or the only detached one.

    Raises:
        UsageError: none matches, several do, which the message names, or its ranks speak another protocol.
    """
    everything = running()
    if name is not None:
        entries = [entry for entry in everything if entry.name == name]
    else:
        free = [entry for entry in everything if entry.has_world and not entry.attached]
        kernel = kernel_id()
        entries = [entry for entry in free if entry.owner == kernel] or free
    names = ", ".join(repr(entry.name) for entry in everything) or "none"
    if not entries:
        problem = f"No cluster {name!r} is running" if name else "No detached cluster found"
        raise UsageError(f"{problem}; running: {names}. Run `%distributed start` to start one.")
    if len(entries) > 1:
        raise UsageError(f"Several detached clusters: {', '.join(repr(e.name) for e in entries)}. Name one of them.")
    if not entries[0].has_world:
        raise UsageError(
            f"{entries[0].name!r} has no ranks: a program started its engines with "
            "ipyparallel.Cluster(engines='axon'). Connect to them with ipyparallel, or run `%distributed start`."
        )
    if entries[0].attached:
        raise UsageError(
            f"The cluster {entries[0].name!r} is in use by another notebook. Stop it there, or run `%distributed "
            "start --name OTHER`."
        )
    if reason := refuse_attach(entries[0].name, entries[0].version):
        raise UsageError(reason)
    return entries[0]


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
        replies = request_all(connection.client, asked, CellsRequest(), timeout_s=_RANK_TIMEOUT_S)
        return [rank for rank in asked if rank not in replies or replies[rank].running]
    finally:
        connection.close()
