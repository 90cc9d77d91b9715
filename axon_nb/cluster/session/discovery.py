"""Clusters that outlived their kernel: found, listed, ended."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from axon_nb.cluster.launch.connection import owner_id
from axon_nb.errors import UsageError
from axon_nb.host.query import AgentQuery
from axon_nb.host.run_dir import RunDir, list_run_dirs
from axon_nb.records.protocol.agent import GetInfo, Stop
from axon_nb.records.protocol.version import Version, read_version, refuse_attach

__all__ = ["KeptCluster", "end_kept", "find", "mine", "running"]

_REPLY_S = 60.0
"""A busy machine keeps an agent from answering for a while."""
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class KeptCluster:
    """A cluster of this user that runs, whoever uses it."""

    run_dir: RunDir
    name: str
    num_ranks: int
    owner: str
    attached: bool
    """Whether a notebook is connected."""
    formed: bool
    """Whether its ranks have joined a world; false for engines that a program started with ipyparallel itself."""
    version: Version
    """What its ranks run."""


def running() -> list[KeptCluster]:
    """All clusters of this user with ranks."""
    found = []
    for run_dir in list_run_dirs():
        info = run_dir.read_info()
        if info.get("world_size"):
            attached = _attached(run_dir)
            found.append(
                KeptCluster(
                    run_dir,
                    info["name"],
                    int(info["world_size"]),
                    info.get("owner", ""),
                    attached,
                    formed="layout" in info,
                    version=read_version(info.get("version")),
                )
            )
    return found


def _attached(run_dir: RunDir) -> bool:
    with contextlib.suppress(OSError, ValueError), AgentQuery(run_dir, timeout_s=_REPLY_S) as agent:
        return bool(agent.request(GetInfo()).get("attached"))
    return False


def mine() -> list[KeptCluster]:
    """Clusters that this notebook's former kernel left behind."""
    me = owner_id()
    return [entry for entry in running() if entry.owner == me and not entry.attached]


def end_kept() -> list[str]:
    """End what this notebook's former kernel left behind; one line for each."""
    lines = []
    for entry in mine():
        with contextlib.suppress(OSError, ValueError), AgentQuery(entry.run_dir, timeout_s=_REPLY_S) as agent:
            agent.request(Stop())  # which an agent of any version knows
            agent.wait_closed(_END_S)
            lines.append(
                f"Ended the cluster {entry.name!r} ({entry.num_ranks} ranks) that this notebook had left running."
            )
    return lines


def find(name: str | None) -> KeptCluster:
    """The cluster to attach to.

    Raises:
        UsageError: none fits, several do, which the message names, or its ranks speak another protocol.
    """
    everything = running()
    if name is not None:
        entries = [entry for entry in everything if entry.name == name]
    else:
        free = [entry for entry in everything if entry.formed and not entry.attached]
        me = owner_id()
        entries = [entry for entry in free if entry.owner == me] or free
    names = ", ".join(repr(entry.name) for entry in everything) or "none"
    if not entries:
        wanted = f"No cluster {name!r} is running" if name else "No cluster waits for a notebook"
        raise UsageError(f"{wanted}; running: {names}. `%distributed start` starts one.")
    if len(entries) > 1:
        raise UsageError(f"Several clusters wait for a notebook: {', '.join(repr(e.name) for e in entries)}; name one.")
    if not entries[0].formed:
        raise UsageError(
            f"{entries[0].name!r} is no cluster of ranks, but engines that a program started with "
            "ipyparallel.Cluster(engines='axon'): connect to them with ipyparallel, or `%distributed start` ranks."
        )
    if entries[0].attached:
        raise UsageError(f"The cluster {entries[0].name!r} is in use by another notebook.")
    if why := refuse_attach(entries[0].name, entries[0].version):
        raise UsageError(why)
    return entries[0]
