"""This user's clusters: attached to a notebook, detached, or dead with files left behind."""

from __future__ import annotations

import contextlib
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from axon_nb.doctor.report import Finding, Section
from axon_nb.host.query import AgentQuery
from axon_nb.host.run_dir import RunDir, all_run_dirs
from axon_nb.records.protocol.agent import GetInfo
from axon_nb.records.units import format_seconds

_REPLY_TIMEOUT_S = 5.0
"""An agent does not reply while it imports torch, but the agent of a cluster with ranks has done so."""


@dataclass(frozen=True, slots=True)
class FoundCluster:
    """A cluster, or the remains of one."""

    run_dir: RunDir
    name: str
    """Its name; the name of its folder if it has none."""
    state: str
    """``attached``: used by a notebook. ``detached``: no notebook uses it. ``unresponsive``: its agent does not reply.
    ``dead``: it has no agent, only files are left."""
    num_ranks: int = 0
    backend: str = ""
    engines: str = ""
    """ipyparallel launcher of the ranks."""
    has_joined: bool = False
    """Whether its ranks have joined a group, so that a notebook can attach."""
    since: float | None = None
    """Unix time at which its ranks started."""
    keep_alive_left_s: float | None = None
    """Seconds until a detached cluster stops; None while attached."""
    last_activity: float | None = None
    """Unix time at which a cell last started or ended, or a notebook connected."""
    agent_pid: int | None = None
    rank_pids: Mapping[int, int] = field(default_factory=dict)
    """Pids of live ranks on this host, by rank."""

    @property
    def folder(self) -> str:
        """Name of its folder, which is unique, unlike the cluster's name."""
        return self.run_dir.path.name

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "name": self.name,
            "state": self.state,
            "num_ranks": self.num_ranks,
            "backend": self.backend or None,
            "engines": self.engines or None,
            "since": self.since,
            "keep_alive_left_s": self.keep_alive_left_s,
            "last_activity": self.last_activity,
            "agent_pid": self.agent_pid,
            "rank_pids": {str(rank): pid for rank, pid in self.rank_pids.items()},
            "folder": str(self.run_dir.path),
        }


def find_clusters() -> list[FoundCluster]:
    """Return this user's clusters on this host; a prewarmed agent without ranks does not count."""
    return [cluster for run_dir in all_run_dirs() if (cluster := _examine(run_dir)) is not None]


def _examine(run_dir: RunDir) -> FoundCluster | None:
    info = run_dir.read_info()
    name = str(info.get("name") or run_dir.path.name)
    if not run_dir.is_alive():
        return None if run_dir.just_created or not run_dir.path.is_dir() else FoundCluster(run_dir, name, "dead")
    if not info.get("world_size"):
        return None
    unresponsive = FoundCluster(
        run_dir,
        name,
        "unresponsive",
        num_ranks=int(info["world_size"]),
        backend=str((info.get("layout") or {}).get("backend", "")),
        engines=str(info.get("engines", "")),
        has_joined=bool(info.get("layout")),
        last_activity=run_dir.last_activity(),
    )
    try:
        with AgentQuery(run_dir, timeout_s=_REPLY_TIMEOUT_S) as agent:
            try:
                reply = agent.request(GetInfo())
            except TimeoutError:
                return replace(unresponsive, agent_pid=agent.pid, since=_started([agent.pid or 0]))
    except (OSError, ValueError):
        return None  # it has stopped meanwhile
    attached = bool(reply["attached"])
    remaining_s = None
    if not attached and reply["left_ns"]:
        keep_alive = float(info.get("keep_alive_s", 0.0))
        remaining_s = max(0.0, keep_alive - (time.monotonic_ns() - int(reply["left_ns"])) / 1e9)
    pids = _rank_pids(reply, info)
    since = _started([*pids.values(), int(reply["pid"])])
    return replace(
        unresponsive,
        state="attached" if attached else "detached",
        since=since,
        keep_alive_left_s=remaining_s,
        agent_pid=int(reply["pid"]),
        rank_pids=pids,
    )


def _rank_pids(reply: Mapping[str, Any], info: Mapping[str, Any]) -> dict[int, int]:
    forked = {int(rank): int(pid) for rank, pid in reply["ranks"].items()}
    if not forked:  # other launchers started them; each rank has reported its host and pid
        here = socket.gethostname()
        reported = enumerate(info.get("rank_info", []))
        forked = {rank: int(each["pid"]) for rank, each in reported if each.get("host") == here}
    return dict(sorted(forked.items()))


def _started(pids: list[int]) -> float | None:
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            return float(psutil.Process(pid).create_time())
    return None


def rank_names(entries: list[FoundCluster]) -> dict[int, str]:
    """Return display names of ranks' processes, by pid."""
    return {pid: f"rank {rank} of {one.name}" for one in entries for rank, pid in one.rank_pids.items()}


def clusters(entries: list[FoundCluster]) -> Section:
    """Report running clusters, and how to stop unused ones."""
    return Section("clusters", tuple(map(_finding, entries)), {"clusters": [one.to_json() for one in entries]})


def _finding(one: FoundCluster) -> Finding:
    value = describe(one)
    if one.state == "attached":
        return Finding(one.name, value)
    word = shlex.quote(one.name)
    stop = f"`axon-nb stop {word}`"
    if one.state == "dead":
        message = "Its host agent was killed; no process is left."
        return Finding(one.name, value, "note", message, f"Run {stop} to remove its files.")
    if one.state == "unresponsive":
        message = "It cannot be stopped or attached while its agent does not reply."
        fix = f"Try {stop} again later; if that does not help, kill its agent with `kill -9 {one.agent_pid}`."
        return Finding(one.name, value, "problem", message, fix)
    attach = f"or `%distributed attach {word}` in a notebook to reconnect" if one.has_joined else ""
    fix = f"Run {stop} to stop it{f', {attach}' if attach else ''}."
    return Finding(one.name, value, "note", "Its ranks still hold memory, including GPU memory.", fix)


def describe(one: FoundCluster) -> str:
    """Describe a cluster in one line."""
    if one.state == "dead":
        return f"dead: files only, in {one.run_dir.path}"
    ranks = f"{one.num_ranks} rank{'s' if one.num_ranks != 1 else ''}"
    parts = [f"{ranks}, {one.backend}" if one.backend else ranks, _since(one), state_words(one)]
    if one.agent_pid is not None:
        parts.append(f"agent pid {one.agent_pid}")
    return ", ".join(filter(None, parts))


def state_words(one: FoundCluster) -> str:
    """Describe a cluster's state for people."""
    words = {"attached": "in use by a notebook", "unresponsive": "its agent does not reply", "dead": "dead: files only"}
    if one.state != "detached":
        return words[one.state]
    if one.keep_alive_left_s is None:
        return "detached"
    return f"detached, stops in {format_seconds(one.keep_alive_left_s)}"


def _since(one: FoundCluster) -> str:
    return "" if one.since is None else f"since {time.strftime('%Y-%m-%d %H:%M', time.localtime(one.since))}"


def ago(time_s: float | None) -> str:
    """Describe how long ago a Unix time was."""
    return "-" if time_s is None else f"{format_seconds(max(0.0, time.time() - time_s))} ago"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of text as lines with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def table(entries: list[FoundCluster]) -> str:
    """Format a table of clusters, with how to stop detached ones."""
    if not entries:
        return "You have no clusters on this host."
    rows = [("NAME", "RANKS", "BACKEND", "SINCE", "LAST ACTIVITY", "AGENT", "STATE")]
    for one in entries:
        dead = one.state == "dead"
        rows.append(
            (
                one.name,
                "-" if dead else str(one.num_ranks),
                one.backend or "-",
                _since(one).removeprefix("since ") or "-",
                ago(one.last_activity),
                "-" if one.agent_pid is None else str(one.agent_pid),
                state_words(one),
            )
        )
    lines = aligned(rows)
    if any(one.state == "detached" and one.has_joined for one in entries):
        lines.append("Run `%distributed attach NAME` in a notebook to reconnect to a detached cluster.")
    if any(one.state != "attached" for one in entries):
        lines.append("Run `axon-nb stop NAME` to stop a cluster, or to remove the files of a dead one.")
    return "\n".join(lines)
