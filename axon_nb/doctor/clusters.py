"""Clusters of this user: those that a notebook uses, those that were left, and what dead ones left behind."""

from __future__ import annotations

import contextlib
import shlex
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from axon_nb.doctor.report import Finding, Section
from axon_nb.host.query import AgentQuery
from axon_nb.host.rundir import RunDir, all_run_dirs
from axon_nb.records.quantity import format_seconds

__all__ = ["FoundCluster", "clusters", "find_clusters", "rank_names", "table"]

_ANSWER_S = 5.0
"""While it imports torch an agent answers nobody; a cluster with ranks has that behind it."""


@dataclass(frozen=True, slots=True)
class FoundCluster:
    """One cluster, or what is left of one."""

    run_dir: RunDir
    name: str
    """What its user calls it; the name of its folder where it has no other."""
    state: str
    """``attached``: a notebook uses it. ``left``: none does. ``silent``: its agent does not answer. ``dead``: it has
    no agent, and only files are left."""
    num_ranks: int = 0
    backend: str = ""
    engines: str = ""
    """ipyparallel launcher of the ranks."""
    formed: bool = False
    """Whether its ranks have joined a world, so that a notebook can attach."""
    since: float | None = None
    """When its ranks were started, in seconds since the epoch."""
    keep_alive_left_s: float | None = None
    """How long a cluster that was left stays, in seconds; None: for as long as it is used."""
    agent_pid: int | None = None
    rank_pids: Mapping[int, int] = field(default_factory=dict)
    """Of the living ranks on this host, by rank."""

    @property
    def folder(self) -> str:
        """Name of its folder: unlike the user's name for it never that of two."""
        return self.run_dir.path.name

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "state": self.state,
            "ranks": self.num_ranks,
            "backend": self.backend or None,
            "engines": self.engines or None,
            "since": self.since,
            "keep_alive_left_s": self.keep_alive_left_s,
            "agent_pid": self.agent_pid,
            "rank_pids": {str(rank): pid for rank, pid in self.rank_pids.items()},
            "folder": str(self.run_dir.path),
        }


def find_clusters() -> list[FoundCluster]:
    """All clusters of this user on this host; an agent that was only warmed up has no ranks, and is none."""
    return [found for run_dir in all_run_dirs() if (found := _examine(run_dir)) is not None]


def _examine(run_dir: RunDir) -> FoundCluster | None:
    info = run_dir.read_info()
    name = str(info.get("name") or run_dir.path.name)
    if not run_dir.is_alive():
        return None if run_dir.just_created or not run_dir.path.is_dir() else FoundCluster(run_dir, name, "dead")
    if not info.get("world_size"):
        return None
    silent = FoundCluster(
        run_dir,
        name,
        "silent",
        num_ranks=int(info["world_size"]),
        backend=str(info.get("layout", {}).get("backend", "")),
        engines=str(info.get("engines", "")),
        formed="layout" in info,
    )
    try:
        with AgentQuery(run_dir, timeout_s=_ANSWER_S) as agent:
            try:
                reply = agent.request("get_info")
            except TimeoutError:
                return replace(silent, agent_pid=agent.pid, since=_started([agent.pid or 0]))
    except (OSError, ValueError):
        return None  # it has ended meanwhile
    attached = bool(reply["attached"])
    left = None
    if not attached and reply["left_ns"]:
        keep_alive = float(reply["info"].get("keep_alive_s", 0.0))
        left = max(0.0, keep_alive - (time.monotonic_ns() - int(reply["left_ns"])) / 1e9)
    pids = _rank_pids(reply)
    since = _started([*pids.values(), int(reply["pid"])])
    return replace(
        silent,
        state="attached" if attached else "left",
        since=since,
        keep_alive_left_s=left,
        agent_pid=int(reply["pid"]),
        rank_pids=pids,
    )


def _rank_pids(reply: dict[str, Any]) -> dict[int, int]:
    forked = {int(rank): int(pid) for rank, pid in reply["ranks"].items()}
    if not forked:  # other launchers than ours have started them, and each has said where it is
        here = socket.gethostname()
        places = reply["info"].get("places", [])
        forked = {rank: int(place["pid"]) for rank, place in enumerate(places) if place.get("host") == here}
    return dict(sorted(forked.items()))


def _started(pids: list[int]) -> float | None:
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            return float(psutil.Process(pid).create_time())
    return None


def rank_names(found: list[FoundCluster]) -> dict[int, str]:
    """What to call the processes of ranks, by pid."""
    return {pid: f"rank {rank} of {one.name}" for one in found for rank, pid in one.rank_pids.items()}


def clusters(found: list[FoundCluster]) -> Section:
    """Which clusters run, and how to end those that nobody uses."""
    return Section("clusters", tuple(map(_finding, found)), {"clusters": [one.as_json() for one in found]})


def _finding(one: FoundCluster) -> Finding:
    value = describe(one)
    if one.state == "attached":
        return Finding(one.name, value)
    word = shlex.quote(one.name)
    stop = f"`axon-nb stop {word}`"
    if one.state == "dead":
        message = "Its host agent was killed; no process is left."
        return Finding(one.name, value, "note", message, f"Run {stop} to remove its files.")
    if one.state == "silent":
        message = "It cannot be stopped or attached while its agent does not answer."
        fix = f"Run {stop} in a while; if that does not help, end its agent with `kill -9 {one.agent_pid}`."
        return Finding(one.name, value, "problem", message, fix)
    back = f"`%distributed attach {word}` in a notebook gets it back" if one.formed else ""
    fix = f"Run {stop} to end it{f'; {back}' if back else ''}."
    return Finding(one.name, value, "note", "Its ranks keep their memory, on GPUs too.", fix)


def describe(one: FoundCluster) -> str:
    """One cluster in a line."""
    if one.state == "dead":
        return f"dead: files only, in {one.run_dir.path}"
    ranks = f"{one.num_ranks} rank{'s' if one.num_ranks != 1 else ''}"
    parts = [f"{ranks}, {one.backend}" if one.backend else ranks, _since(one), state_words(one)]
    if one.agent_pid is not None:
        parts.append(f"agent pid {one.agent_pid}")
    return ", ".join(filter(None, parts))


def state_words(one: FoundCluster) -> str:
    """Its state as people read it."""
    words = {"attached": "in use by a notebook", "silent": "its agent does not answer", "dead": "dead: files only"}
    if one.state != "left":
        return words[one.state]
    if one.keep_alive_left_s is None:
        return "left"
    return f"left, ends in {format_seconds(one.keep_alive_left_s)}"


def _since(one: FoundCluster) -> str:
    return "" if one.since is None else f"since {time.strftime('%Y-%m-%d %H:%M', time.localtime(one.since))}"


def table(found: list[FoundCluster]) -> str:
    """All of them, a row each, with how to end those that were left."""
    if not found:
        return "No cluster of yours is running on this host."
    rows = [("NAME", "RANKS", "BACKEND", "SINCE", "AGENT", "STATE")]
    for one in found:
        dead = one.state == "dead"
        rows.append(
            (
                one.name,
                "-" if dead else str(one.num_ranks),
                one.backend or "-",
                _since(one).removeprefix("since ") or "-",
                "-" if one.agent_pid is None else str(one.agent_pid),
                state_words(one),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if any(one.state == "left" and one.formed for one in found):
        lines.append("`%distributed attach NAME` in a notebook gets back a cluster that was left.")
    if any(one.state != "attached" for one in found):
        lines.append("`axon-nb stop NAME` ends a cluster, or removes the files of a dead one.")
    return "\n".join(lines)
