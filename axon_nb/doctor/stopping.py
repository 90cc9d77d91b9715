"""`axon-nb stop`: ending clusters through their own host agents, and removing what dead ones left."""

from __future__ import annotations

import contextlib
import difflib
import shlex
import time

import psutil

from axon_nb.doctor.clusters import FoundCluster, find_clusters
from axon_nb.errors import AxonError, UsageError
from axon_nb.host.query import AgentQuery

__all__ = ["StopFailedError", "stop_clusters"]

_ENDED_S = 15.0
_ANSWER_S = 5.0


class StopFailedError(AxonError):
    """A cluster was asked to stop, and something of it is still there."""


def stop_clusters(name: str | None, *, everything: bool = False, force: bool = False) -> list[str]:
    """Stop a cluster; what dead ones left is removed with it unless one is named.

    Args:
        name: Which, by its name or its folder's; None: the only one that no notebook uses.
        everything: All of them rather than one.
        force: Those that a notebook uses, too.

    Returns:
        What was done, a sentence each.

    Raises:
        UsageError: none fits, several do, or a notebook uses it.
        StopFailedError: something is left after 15 seconds.
    """
    if name is not None and everything:
        raise UsageError("axon-nb stop: NAME or --all, not both.")
    found = find_clusters()
    chosen = [_named(found, name, force=force)] if name is not None else _all(found, several=everything, force=force)
    lines, failures = [], []
    for one in chosen:
        try:
            lines.append(_stop(one))
        except StopFailedError as error:
            failures.append(str(error))
    if failures:
        raise StopFailedError(" ".join([*lines, *failures]))
    if everything and not force:
        used = [one.name for one in found if one.state == "attached"]
        if used:
            verb, them = ("is", "it") if len(used) == 1 else ("are", "them")
            lines.append(f"{_list(used)} {verb} in use by a notebook and {verb} kept: --force stops {them} too.")
    return lines or ["No cluster of yours is running on this host."]


def _named(found: list[FoundCluster], name: str, *, force: bool) -> FoundCluster:
    fitting = [one for one in found if one.name == name] or [one for one in found if one.folder == name]
    if len(fitting) > 1:
        folders = ", ".join(f"{one.folder} ({one.state})" for one in fitting)
        raise UsageError(f"axon-nb stop: several clusters are called {name!r}: name one by its folder: {folders}.")
    if not fitting:
        names = [one.name for one in found]
        close = difflib.get_close_matches(name, names, n=1)
        there = f"did you mean {close[0]!r}?" if close else f"there are {_list(names)}." if names else "there is none."
        raise UsageError(f"axon-nb stop: you have no cluster {name!r} on this host: {there}")
    if fitting[0].state == "attached" and not force:
        raise UsageError(
            f"axon-nb stop: the cluster {name!r} is in use by a notebook: run `%distributed stop` there, or "
            f"`axon-nb stop {shlex.quote(name)} --force`."
        )
    return fitting[0]


def _all(found: list[FoundCluster], *, several: bool, force: bool) -> list[FoundCluster]:
    dead = [one for one in found if one.state == "dead"]
    living = [one for one in found if one.state != "dead" and (force or one.state != "attached")]
    if len(living) > 1 and not several:
        names = _list([one.name for one in living])
        raise UsageError(
            f"axon-nb stop: {names} are running: run `axon-nb stop NAME` with one, or `axon-nb stop --all`."
        )
    if not living and not dead and not several and found:
        used = _list([one.name for one in found])
        raise UsageError(
            f"axon-nb stop: only {used} {'is' if len(found) == 1 else 'are'} running, in use by a notebook: run "
            "`%distributed stop` there, or add --force."
        )
    return [*living, *dead]


def _stop(one: FoundCluster) -> str:
    if one.state == "dead":
        return _remove(one)
    if one.state == "silent":
        raise StopFailedError(_no_answer(one))
    members = _members(one)
    if one.engines not in ("axon", ""):
        _shut_down_engines(one, members)
    try:
        with AgentQuery(one.run_dir, timeout_s=_ANSWER_S) as agent:
            agent.request("stop")
            ended = agent.wait_closed(_ENDED_S)
    except TimeoutError:
        raise StopFailedError(_no_answer(one)) from None
    except (OSError, ValueError):
        ended = True  # it has ended by itself meanwhile
    left = _wait(members, one)
    if left or not ended:
        pids = " ".join(str(process.pid) for process in left)
        raise StopFailedError(
            f"The cluster {one.name!r} has not ended within {_ENDED_S:.0f} s: `kill -9 {pids}` ends what is left."
            if left
            else f"The host agent of {one.name!r} has not ended within {_ENDED_S:.0f} s: run `axon-nb list` in a while."
        )
    ranks = f"{one.num_ranks} rank{'s' if one.num_ranks != 1 else ''}"
    return f"Stopped the cluster {one.name!r}: {ranks} ended."


def _no_answer(one: FoundCluster) -> str:
    """What to do about a cluster whose agent is stuck or suspended."""
    ranks = " with all its ranks" if one.engines == "axon" else ""  # others notice after half a minute
    return (
        f"The host agent of {one.name!r} has not answered within {_ANSWER_S:.0f} s: try again, or end it{ranks} with "
        f"`kill -9 {one.agent_pid}`."
    )


def _remove(one: FoundCluster) -> str:
    if one.run_dir.is_alive():  # the name was given again, or the agent was only starting
        raise StopFailedError(
            f"The cluster {one.name!r} has come to life: run `axon-nb stop {shlex.quote(one.name)}` again."
        )
    one.run_dir.remove()
    if one.run_dir.path.exists():
        raise StopFailedError(f"Not all files of {one.name!r} could be removed: run `rm -r {one.run_dir.path}`.")
    return f"Removed what the dead cluster {one.name!r} left in {one.run_dir.path}."


def _members(one: FoundCluster) -> list[psutil.Process]:
    """Its processes on this host, only to see that they end; psutil knows them from others that get their pids."""
    members: dict[int, psutil.Process] = {}
    for pid in (one.agent_pid, *one.rank_pids.values()):
        with contextlib.suppress(psutil.Error):
            if pid is not None:
                process = psutil.Process(pid)
                for member in (process, *process.children(recursive=True)):
                    members[member.pid] = member
    return list(members.values())


def _wait(members: list[psutil.Process], one: FoundCluster) -> list[psutil.Process]:
    end = time.monotonic() + _ENDED_S
    left = members
    while (left := [member for member in left if _lives(member)]) or one.run_dir.path.exists():
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    return left


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _shut_down_engines(one: FoundCluster, members: list[psutil.Process]) -> None:
    """End the engines of other launchers than ours, which the host agent does not own."""
    from axon_nb.cluster.client import connect

    with contextlib.suppress(Exception):  # without a controller they end by themselves
        client = connect(one.run_dir.client_file, timeout_s=_ANSWER_S, alive=one.run_dir.alive)
        try:
            client.wait_registered(range(one.num_ranks), 1.0)  # returns early where all live
            client.shutdown(targets="all", hub=False, block=False)
            client.wait_unregistered(range(one.num_ranks), _ANSWER_S)
            # One that loses its controller while it ends may stay for half a minute.
            psutil.wait_procs([member for member in members if member.pid in one.rank_pids.values()], _ANSWER_S)
        finally:
            client.close(linger=0)


def _list(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names)
