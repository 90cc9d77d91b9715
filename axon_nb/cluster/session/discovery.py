"""Find, list and stop clusters of this user, such as those that outlived their kernel."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from axon_nb.cluster.launch.connection import kernel_id
from axon_nb.errors import UsageError
from axon_nb.host.query import AgentQuery
from axon_nb.host.run_dir import RunDir, list_run_dirs
from axon_nb.records.protocol.agent import GetInfo, Stop
from axon_nb.records.protocol.version import Version, read_version, refuse_attach

__all__ = ["ClusterEntry", "find", "own_detached", "running", "stop_detached"]

_REPLY_TIMEOUT_S = 60.0
"""On a busy machine an agent may take a while to reply."""
_STOP_TIMEOUT_S = 10.0


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
    found = []
    for run_dir in list_run_dirs():
        info = run_dir.read_info()
        if info.get("world_size"):
            attached = _attached(run_dir)
            found.append(
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
    return found


def _attached(run_dir: RunDir) -> bool:
    with contextlib.suppress(OSError, ValueError), AgentQuery(run_dir, timeout_s=_REPLY_TIMEOUT_S) as agent:
        return bool(agent.request(GetInfo()).get("attached"))
    return False


def own_detached() -> list[ClusterEntry]:
    """Return the detached clusters that this notebook's previous kernel left running."""
    own = kernel_id()
    return [entry for entry in running() if entry.owner == own and not entry.attached]


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
        own = kernel_id()
        entries = [entry for entry in free if entry.owner == own] or free
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
        raise UsageError(f"The cluster {entries[0].name!r} is in use by another notebook.")
    if reason := refuse_attach(entries[0].name, entries[0].version):
        raise UsageError(reason)
    return entries[0]
