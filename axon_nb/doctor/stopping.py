"""`axon-nb stop`: stops clusters through their own host agents, and removes the files of dead ones."""

from __future__ import annotations

import contextlib
import difflib
import shlex
import time

import psutil

from axon_nb.doctor.clusters import FoundCluster, find_clusters
from axon_nb.errors import AxonError, UsageError
from axon_nb.host.query import AgentQuery
from axon_nb.records.protocol.agent import Stop

_STOP_TIMEOUT_S = 15.0
_REPLY_TIMEOUT_S = 5.0


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
        [_named(entries, name, force=force)] if name is not None else _all(entries, several=everything, force=force)
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


def _all(entries: list[FoundCluster], *, several: bool, force: bool) -> list[FoundCluster]:
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
    ranks = f"{one.num_ranks} rank{'s' if one.num_ranks != 1 else ''}"
    return f"Stopped cluster {one.name!r} ({ranks})."


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
    from axon_nb.cluster.rpc.client import connect

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
