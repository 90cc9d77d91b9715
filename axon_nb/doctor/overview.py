"""The clusters of all users of this host, for whoever looks after it: from what `/proc` shows to everybody.

Names and times of other users' clusters are in private folders, which only root can read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from axon_nb.doctor.clusters import ago, aligned
from axon_nb.host.run_dir import RunDir
from axon_nb.records.units import format_bytes

_AGENT = "axon_nb.host"
_FOLDER = "--run-dir="


@dataclass(frozen=True, slots=True)
class SeenCluster:
    """A cluster of any user."""

    user: str
    name: str
    """Empty if its folder cannot be read."""
    num_ranks: int
    """Live ranks on this host."""
    memory_bytes: int
    """Memory of its agent, controller and ranks that they do not share with other processes."""
    last_activity: float | None
    """Unix time at which a cell last started or ended; None if its folder cannot be read."""
    agent_pid: int

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self)


def find_all() -> list[SeenCluster]:
    """Return the clusters with ranks on this host that this user can see, ordered by user; the largest first."""
    found = [one for agent, folder in _agents() if (one := _examine(agent, folder)) is not None]
    return sorted(found, key=lambda one: (one.user, -one.memory_bytes))


def _agents() -> Iterator[tuple[psutil.Process, str]]:
    for process in psutil.process_iter():
        try:
            folder = _folder_of(process)
            parent = process.parent()
            if folder and (parent is None or _folder_of(parent) != folder):  # else a rank: a fork of the agent
                yield process, folder
        except psutil.Error:
            continue


def _folder_of(process: psutil.Process) -> str:
    words = process.cmdline()
    folders = [word.removeprefix(_FOLDER) for word in words if word.startswith(_FOLDER)]
    return folders[0] if folders and _AGENT in words else ""


def _examine(agent: psutil.Process, folder: str) -> SeenCluster | None:
    run_dir = RunDir(Path(folder))
    try:
        members = [agent, *agent.children(recursive=True)]
        num_ranks = sum(_folder_of(one) == folder and one.ppid() == agent.pid for one in members[1:])
        user = agent.username()
    except psutil.Error:
        return None
    if not num_ranks:
        return None  # one that was started in advance
    name = str(run_dir.read_info().get("name") or "")
    return SeenCluster(user, name, num_ranks, sum(map(_memory, members)), run_dir.last_activity(), agent.pid)


def _memory(process: psutil.Process) -> int:
    try:
        memory = process.memory_info()
    except psutil.Error:
        return 0
    return int(memory.rss - getattr(memory, "shared", 0))


def overview(found: list[SeenCluster]) -> str:
    """Format a table of clusters, with the sums."""
    if not found:
        return "No cluster has ranks on this host, or this user may not see other users' processes."
    rows = [("USER", "NAME", "RANKS", "MEMORY", "LAST ACTIVITY", "AGENT")]
    for one in found:
        memory = format_bytes(one.memory_bytes)
        rows.append((one.user, one.name or "-", f"{one.num_ranks}", memory, ago(one.last_activity), f"{one.agent_pid}"))
    users, ranks = len({one.user for one in found}), sum(one.num_ranks for one in found)
    memory = format_bytes(sum(one.memory_bytes for one in found))
    counts = ((len(found), "cluster"), (users, "user"), (ranks, "rank"))
    total = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
    return "\n".join([*aligned(rows), f"{total}, {memory}."])
