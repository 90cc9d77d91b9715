"""This user's clusters, attached, detached or dead, and how to stop them; the clusters of all users of this host.

`axon-nb stop` stops clusters through their own host agents, and removes the files of dead ones. The overview of all
users is for whoever looks after the host: it is what `/proc` shows to everybody. Names and times of other users'
clusters are in private folders, which only root can read.
"""

from __future__ import annotations

import contextlib
import difflib
import shlex
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct, field, to_builtins
from msgspec.structs import replace

from axon_nb.doctor.report import Finding, Section
from axon_nb.errors import AxonError, UsageError
from axon_nb.host.client import AgentQuery
from axon_nb.host.run_dir import RunDir, all_run_dirs
from axon_nb.records.protocol.agent import GetInfo, Stop
from axon_nb.records.units import aligned, count_of, format_bytes, format_seconds

_REPLY_TIMEOUT_S = 5.0
"""An agent does not reply while it imports torch, but the agent of a cluster with ranks has done so."""
_AGENT = "axon_nb.host"
_FOLDER = "--run-dir="
_STOP_TIMEOUT_S = 15.0


class FoundCluster(Struct, frozen=True):
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
        names = ("name", "state", "num_ranks", "since", "keep_alive_left_s", "last_activity", "agent_pid")
        return {
            **{name: getattr(self, name) for name in names},
            "backend": self.backend or None,
            "engines": self.engines or None,
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
    ranks = count_of(one.num_ranks, "rank")
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


class SeenCluster(Struct, frozen=True):
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
        return to_builtins(self)  # type: ignore[no-any-return]


def find_all() -> list[SeenCluster]:
    """Return the clusters with ranks on this host that this user can see, ordered by user; the largest first."""
    found = [one for agent, folder in _agents() if (one := _examine_unknown(agent, folder)) is not None]
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


def _examine_unknown(agent: psutil.Process, folder: str) -> SeenCluster | None:
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
    return SeenCluster(user, name, num_ranks, sum(map(_used_memory, members)), run_dir.last_activity(), agent.pid)


def _used_memory(process: psutil.Process) -> int:
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
    total = ", ".join(count_of(*each) for each in counts)
    return "\n".join([*aligned(rows), f"{total}, {memory}."])


class StopFailedError(AxonError):
    """A cluster did not stop completely."""


def stop_clusters(name: str | None, *, everything: bool = False, force: bool = False) -> list[str]:
    """Stop a cluster; unless one is named, also remove the files of dead clusters.

    Args:
        name: Name of the cluster or of its folder; None for the only one that no notebook uses.
        everything: Stop all clusters that no notebook uses.
        force: Also stop clusters that a notebook uses.

    Returns:
        What was done, one sentence per cluster.

    Raises:
        UsageError: no cluster matches, several do, or a notebook uses it.
        StopFailedError: something is still running after 15 seconds.
    """
    if name is not None and everything:
        raise UsageError("axon-nb stop: give NAME or --all, not both.")
    entries = find_clusters()
    targets = (
        [_named(entries, name, force=force)]
        if name is not None
        else _stoppable(entries, several=everything, force=force)
    )
    lines, failures = [], []
    for one in targets:
        try:
            lines.append(_stop(one))
        except StopFailedError as error:
            failures.append(str(error))
    if failures:
        raise StopFailedError(" ".join([*lines, *failures]))
    if everything and not force:
        used = [one.name for one in entries if one.state == "attached"]
        if used:
            verb, them = ("is", "it") if len(used) == 1 else ("are", "them")
            lines.append(f"{_list(used)} {verb} in use by a notebook; use --force to stop {them} too.")
    return lines or ["You have no clusters on this host."]


def _named(entries: list[FoundCluster], name: str, *, force: bool) -> FoundCluster:
    matching = [one for one in entries if one.name == name] or [one for one in entries if one.folder == name]
    if len(matching) > 1:
        folders = ", ".join(f"{one.folder} ({one.state})" for one in matching)
        raise UsageError(f"axon-nb stop: several clusters are named {name!r}; use a folder name instead: {folders}.")
    if not matching:
        names = [one.name for one in entries]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" did you mean {close[0]!r}?" if close else f" you have {_list(names)}." if names else ""
        raise UsageError(f"axon-nb stop: no cluster named {name!r} on this host{';' if hint else '.'}{hint}")
    if matching[0].state == "attached" and not force:
        raise UsageError(
            f"axon-nb stop: cluster {name!r} is in use by a notebook: run `%distributed stop` there, or "
            f"`axon-nb stop {shlex.quote(name)} --force`."
        )
    return matching[0]


def _stoppable(entries: list[FoundCluster], *, several: bool, force: bool) -> list[FoundCluster]:
    dead = [one for one in entries if one.state == "dead"]
    living = [one for one in entries if one.state != "dead" and (force or one.state != "attached")]
    if len(living) > 1 and not several:
        names = _list([one.name for one in living])
        raise UsageError(
            f"axon-nb stop: {names} are running: choose one with `axon-nb stop NAME`, or use `axon-nb stop --all`."
        )
    if not living and not dead and not several and entries:
        used = _list([one.name for one in entries])
        raise UsageError(
            f"axon-nb stop: only {used} {'is' if len(entries) == 1 else 'are'} running, in use by a notebook: run "
            "`%distributed stop` there, or add --force."
        )
    return [*living, *dead]


def _stop(one: FoundCluster) -> str:
    if one.state == "dead":
        return _remove(one)
    if one.state == "unresponsive":
        raise StopFailedError(_no_reply(one))
    members = _members(one)
    if one.engines not in ("axon", ""):
        _shut_down_engines(one, members)
    try:
        with AgentQuery(one.run_dir, timeout_s=_REPLY_TIMEOUT_S) as agent:
            agent.request(Stop())
            ended = agent.wait_closed(_STOP_TIMEOUT_S)
    except TimeoutError:
        raise StopFailedError(_no_reply(one)) from None
    except (OSError, ValueError):
        ended = True  # it stopped by itself meanwhile
    left = _wait(members, one)
    if left or not ended:
        pids = " ".join(str(process.pid) for process in left)
        raise StopFailedError(
            f"Cluster {one.name!r} did not stop within {_STOP_TIMEOUT_S:.0f} s. Run `kill -9 {pids}` to kill the rest."
            if left
            else f"The host agent of {one.name!r} did not stop within {_STOP_TIMEOUT_S:.0f} s; see `axon-nb list`."
        )
    return f"Stopped cluster {one.name!r} ({count_of(one.num_ranks, 'rank')})."


def _no_reply(one: FoundCluster) -> str:
    """Tell what to do about a cluster whose agent is stuck or suspended."""
    ranks = (
        " with all its ranks" if one.engines == "axon" else ""
    )  # ranks of other launchers notice after half a minute
    return (
        f"The host agent of {one.name!r} did not reply within {_REPLY_TIMEOUT_S:.0f} s. Try again, or kill it{ranks} "
        f"with `kill -9 {one.agent_pid}`."
    )


def _remove(one: FoundCluster) -> str:
    if one.run_dir.is_alive():  # the name was reused, or the agent was still starting
        raise StopFailedError(f"Cluster {one.name!r} is running again. Repeat `axon-nb stop {shlex.quote(one.name)}`.")
    one.run_dir.remove()
    if one.run_dir.path.exists():
        raise StopFailedError(f"Could not remove all files of {one.name!r}. Run `rm -r {one.run_dir.path}`.")
    return f"Removed the files of dead cluster {one.name!r} in {one.run_dir.path}."


def _members(one: FoundCluster) -> list[psutil.Process]:
    """Its processes on this host, to see that they exit; psutil recognises reused pids."""
    members: dict[int, psutil.Process] = {}
    for pid in (one.agent_pid, *one.rank_pids.values()):
        with contextlib.suppress(psutil.Error):
            if pid is not None:
                process = psutil.Process(pid)
                for member in (process, *process.children(recursive=True)):
                    members[member.pid] = member
    return list(members.values())


def _wait(members: list[psutil.Process], one: FoundCluster) -> list[psutil.Process]:
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    left = members
    while (left := [member for member in left if _lives(member)]) or one.run_dir.path.exists():
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _shut_down_engines(one: FoundCluster, members: list[psutil.Process]) -> None:
    """Shut down engines of other launchers, which the host agent does not own."""
    from axon_nb.cluster.rpc import connect

    with contextlib.suppress(Exception):  # without a controller they exit by themselves
        client = connect(one.run_dir.client_file, timeout_s=_REPLY_TIMEOUT_S, alive=one.run_dir.is_alive)
        try:
            client.wait_registered(range(one.num_ranks), 1.0)  # returns early if all are alive
            client.shutdown(targets="all", hub=False, block=False)
            client.wait_unregistered(range(one.num_ranks), _REPLY_TIMEOUT_S)
            # An engine that loses its controller while shutting down may stay for half a minute.
            psutil.wait_procs([member for member in members if member.pid in one.rank_pids.values()], _REPLY_TIMEOUT_S)
        finally:
            client.close(linger=0)


def _list(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names)
