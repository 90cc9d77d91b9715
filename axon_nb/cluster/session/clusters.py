"""The clusters of this user: start, find, attach to, restart and stop them, and reconnect to those that are kept.

The notebook's previous kernel may have left clusters running. Nothing that is kept is ended unasked. A command that
needs a cluster reconnects to the kept one. Only `start`, `stop` and `restart` end it, and `start` refuses while a cell
runs there (`raise_if_busy`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.endpoint import Endpoint
from axon_nb.cluster.failures import describe_death
from axon_nb.cluster.inspection.variables import PREDEFINED
from axon_nb.cluster.launch import compatibility
from axon_nb.cluster.launch.connection import Connection, default_name, in_kernel, kernel_id, open_existing, open_new
from axon_nb.cluster.launch.engines import check_launcher, join_world, launch_engines, stop_engines
from axon_nb.cluster.launch.hosts import HostsOption, await_hosts, own_address, parse_hosts, with_room
from axon_nb.cluster.launch.placement import (
    LOOPBACK,
    Layout,
    plan_layout,
    raise_if_over_quota,
    raise_if_too_few,
    with_scheduler_options,
)
from axon_nb.cluster.ranks.transitions import Died
from axon_nb.cluster.rpc import request_all, wait_for_output
from axon_nb.cluster.session import current
from axon_nb.cluster.session.current import NotebookSession
from axon_nb.cluster.session.reattach import reattach_cells
from axon_nb.cluster.settings import settings_facts
from axon_nb.cluster.state import ClusterState
from axon_nb.errors import NoClusterError, StartError, UsageError
from axon_nb.host.client import AgentQuery
from axon_nb.host.run_dir import RunDir, list_run_dirs
from axon_nb.records.protocol.agent import ClusterFacts, GetInfo, ReserveGpus, SetInfo, Stop
from axon_nb.records.protocol.cells import CellsRequest, NamesRequest
from axon_nb.records.protocol.wire import Version, decode, encode, own_version, read_version, refuse_attach
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import count_of
from axon_nb.troubleshooting import more

_REGISTRATION_TIMEOUT_S = 20.0
"""The controller reports engines to a new client within milliseconds; it takes longer on a busy machine."""
_OUTPUT_TIMEOUT_S = 5.0
"""For output to reach a new client; it takes longer only if all ranks are in C code that holds the GIL."""
_KILL_TIMEOUT_S = 10.0
_UNFINISHED = "was being replaced when its notebook was killed"
_FOREIGN_REGISTRATION_TIMEOUT_S = 2.0
"""For engines of other launchers, of which it is unknown how many are alive."""
_REPLY_TIMEOUT_S = 60.0
"""On a busy machine an agent may take a while to reply."""
_STOP_TIMEOUT_S = 10.0
_RANK_TIMEOUT_S = 2.0
"""The control thread of a rank replies in milliseconds, unless C code holds the GIL or the process is stopped."""
_DETACHED_REGISTRATION_TIMEOUT_S = 5.0
_HOLDINGS_TIMEOUT_S = 2.0
"""The control thread of a rank replies in milliseconds, unless C code holds the GIL or the process is stopped."""
_MAX_NAMES = 8
_MODULE = "builtins.module"


def own_rank() -> int | None:
    """Return this process's rank; None in the notebook."""
    # Without an import: it would load torch in the notebook. A rank has loaded it.
    session = sys.modules.get("axon_nb.engine.session")
    rank: int | None = session.own_rank() if session is not None else None
    return rank


def _refuse_on_a_rank(command: str) -> None:
    if (rank := own_rank()) is not None:
        raise UsageError(
            f"`%distributed {command}` was run on rank {rank}, inside a cell of the cluster: run it in a cell of the "
            "notebook itself, without `%%distributed`."
        )


def start(
    n: int | None = None,
    *,
    devices: str = "auto",
    backend: str = "auto",
    engines: str | None = None,
    name: str | None = None,
    interface: str | None = None,
    hosts: str | None = None,
    gpus_per_rank: int | None = None,
    placement: str | None = None,
    sync: str | None = None,
    force: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Cluster:
    """Start a cluster and make it the current one. Returns once every rank is in the group and has passed a barrier.

    Args:
        n: Number of ranks; None: one per free GPU, or min(4, max(2, cores)) without GPUs or on a single one.
        devices: ``auto``, ``cpu``, or GPU numbers such as ``2,5``.
        backend: ``auto``, ``shm``, ``gloo`` or ``nccl``.
        engines: ipyparallel launcher; None: ``axon`` (forked ranks) on Linux, ``local`` elsewhere.
        name: Name of the cluster, unique among the user's clusters; None: the notebook's name, or ``default``.
        interface: Network interface of this host, or its IPv4 address, on which ranks on other hosts reach it; None:
            all ranks are on this host, and only Unix sockets and loopback are opened.
        hosts: Other hosts that run ranks, too: ``ssh:a,b``, ``slurm`` or ``slurm:JOB``, ``join`` or ``join:2``; or
            ``ray``, ``ray:ADDRESS`` or ``k8s:NAMESPACE=RANKS``, which then run all of them; None: there are none.
        gpus_per_rank: How many GPUs Ray or Kubernetes reserves for each rank, 0 or 1; None: 1 if it has GPUs.
        placement: ``pack``: Ray places the ranks on few nodes; ``spread``: evenly on all; None: ``pack``.
        sync: A folder whose files other hosts get, such as that of the notebook, now and before each cell whatever
            has changed: what git does not ignore, files up to 10 MiB, 100 MiB together; None: none.
        force: Whether to stop ranks that this notebook left running even while a cell runs there.
        on_progress: Called with texts such as ``Starting 4 ranks … 3 of 4``.

    Raises:
        UsageError: the request cannot be satisfied, or a cell runs on ranks that this notebook left running.
        StartError: the ranks failed to start.
    """
    _refuse_on_a_rank("start")
    session = current.session()
    several_hosts = interface is not None or hosts is not None
    chosen_settings = session.settings.snapshot()
    plan = functools.partial(
        plan_layout, n, devices=devices, backend=backend, threads=chosen_settings.threads, several_hosts=several_hosts
    )
    layout = plan()
    launcher = engines or ("axon" if hasattr(os, "fork") and os.path.isdir("/proc") else "local")
    check_launcher(launcher)
    hosts = with_scheduler_options(hosts, gpus_per_rank, placement)
    others = None if hosts is None else parse_hosts(hosts, layout.num_ranks)
    ip = own_address(interface, others, launcher, sync=sync)
    if _make_room(session, force=force):
        layout = plan()  # with the GPUs that are free now
    cluster_name = _free_name(name)
    _check_number(layout)
    others, layout, ip = with_room(others, layout, ip, cpu=devices == "cpu", backend=backend)
    connection = launched = None
    starting = f"Starting {count_of(layout.num_ranks, 'rank')} …"
    try:
        on_progress(f"{starting} 0 of {layout.num_ranks}")
        if several_hosts:
            connection = _open_to_hosts(session, ip, others)
        else:
            connection = session.prewarm.take(chosen_settings.start_timeout)
        if layout.reserves:
            _reserve_gpus(connection, layout, cluster_name, shares=devices != "auto")
        if others is not None:
            layout = await_hosts(connection, layout, others, timeout_s=chosen_settings.start_timeout, sync=sync)
        end = time.monotonic() + chosen_settings.start_timeout
        launched = launch_engines(
            connection,
            layout,
            engines=launcher,
            timeout_s=chosen_settings.start_timeout,
            on_registered=lambda count: on_progress(f"{starting} {count} of {layout.num_ranks}"),
        )
        rank_info = join_world(connection, layout, chosen_settings, timeout_s=max(1.0, end - time.monotonic()))
        layout = compatibility.with_possible_backend(layout, rank_info)
        timeout_s = compatibility.collective_timeout(chosen_settings, recoverable=False)
        for note in compatibility.at_start(rank_info, layout.backend, timeout_s=timeout_s):
            print("\n".join([note, *more(note)]), file=sys.stderr)
        facts = ClusterFacts(
            name=cluster_name,
            engines=launcher,
            ip=connection.ip,
            hosts="" if others is None else others.text,
            sync="" if connection.folder is None else str(connection.folder.folder),
            world_size=layout.num_ranks,
            version=own_version(),
            **settings_facts(chosen_settings),
            layout=encode(layout),
            rank_info=tuple(rank_info),
        )
        connection.agent.call(SetInfo(facts))
        cluster = session.new_cluster(ClusterState(connection, layout, chosen_settings, facts))
    except BaseException:
        if launched is not None:
            stop_engines(launched)
        if connection is not None:
            connection.stop()
        if others is not None:
            others.give_back()
        raise
    cluster.state.launched = launched
    session.put(cluster)
    Endpoint(cluster, lambda: session.settings.share).start()
    return cluster


def _open_to_hosts(session: NotebookSession, ip: str | None, others: HostsOption | None) -> Connection:
    session.prewarm.discard()
    connection = open_new(ip=ip or LOOPBACK, ranks_here=others is None or others.counts[0] > 0)
    if note := compatibility.unencrypted():
        print(note, file=sys.stderr)
    print(f"The controller, the rendezvous store and Gloo listen on {ip} for ranks on other hosts.")
    return connection


def _check_number(layout: Layout) -> None:
    raise_if_too_few(layout.num_ranks)
    raise_if_over_quota(layout.num_ranks)
    for note in layout.notes:
        print(note)


def _reserve_gpus(connection: Connection, layout: Layout, name: str, *, shares: bool) -> None:
    """Reserve the GPUs of the ranks; refuse if another cluster has just done so, unless the user has named them."""
    taken = connection.agent.call(ReserveGpus(layout.reserves, name)).owners
    if taken and not shares:
        owners = " and ".join(dict.fromkeys(taken.values()))
        raise StartError(
            f"{owners} reserved a GPU while this cluster started. Run `%distributed start` again to use those that are "
            "free now, or name GPUs with `--devices` to share them."
        )


def _make_room(session: NotebookSession, *, force: bool) -> bool:
    """Stop what this notebook left running, and return whether it was something.

    Raises:
        UsageError: it has a cluster, or a cell runs there.
    """
    if (existing := session.cluster) is not None:
        raise UsageError(
            f"The cluster {existing.name!r} with {count_of(existing.world_size, 'rank')} is running. Run "
            "`%distributed stop` to stop it, or `%distributed restart` to restart its ranks."
        )
    if not force:
        raise_if_busy()
    if session.loss:
        print(session.loss)
    stopped = stop_detached()
    for line in stopped:
        print(line)
    return bool(stopped)


def _free_name(name: str | None) -> str:
    taken = {entry.name for entry in running()}
    if name is not None:
        if name in taken:
            raise UsageError(
                f"A cluster {name!r} is already running. Run `%distributed attach {name}`, or choose another name."
            )
        return name
    base, number = default_name(), 1
    while (candidate := base if number == 1 else f"{base}-{number}") in taken:
        number += 1
    return candidate


def attach(name: str | None = None) -> Cluster:
    """Reconnect to a cluster whose kernel was restarted or died; its ranks keep their state.

    A running cell continues: its output is shown here, and `Cluster.running_cell` is its handle. The notebook takes
    over the cluster's settings, except those that were set here.

    Args:
        name: Which; None: this notebook's own, or the only detached one.

    Raises:
        UsageError: there is none, it is used by another notebook that is connected, or its ranks run another version.
        StartError: none of its ranks is alive.
    """
    _refuse_on_a_rank("attach")
    session = current.session()
    if (existing := session.cluster) is not None:
        raise UsageError(f"This notebook already has the cluster {existing.name!r}. Run `%distributed stop` first.")
    entry = find(name)
    session.prewarm.discard()
    connection = open_existing(entry.run_dir)
    hello_reply = connection.agent.hello_reply
    facts = hello_reply.info
    assert facts is not None  # `find` has read them
    layout: Layout = decode(Layout, facts.layout)
    unfinished = _kill_unfinished(connection, facts)
    live_ranks = _live_ranks(connection, facts.engines, layout.num_ranks) - unfinished
    if not live_ranks:
        connection.stop()
        raise StartError(
            f"No rank of the cluster {facts.name!r} is alive. Run `%distributed start` to start a new cluster."
        )
    wait_for_output(connection.client, live_ranks, timeout_s=_OUTPUT_TIMEOUT_S)
    settings = session.settings.inherit(dict(facts.settings))
    if facts.sync:
        connection.sync(facts.sync)
    cluster = session.new_cluster(ClusterState(connection, layout, settings, facts))
    cluster.state.is_paused = layout.backend == "nccl"  # in doubt
    for rank in set(cluster.ranks) - live_ranks:
        event = hello_reply.deaths.get(rank)
        reason = "died while no notebook was connected" if event is None else describe_death(event)
        cluster.health.feed(Died(rank, _UNFINISHED if rank in unfinished else reason))
    session.put(cluster)
    Endpoint(cluster, lambda: session.settings.share).start()
    session.settings.apply_again()
    cluster.running_cell = reattach_cells(cluster.cells, left_ns=hello_reply.left_ns)
    return cluster


def _kill_unfinished(connection: Connection, facts: ClusterFacts) -> set[int]:
    """Kill the processes that a repair forked and did not finish: they are not in the group; return their ranks."""
    if facts.engines != "axon":
        return set()
    joined = {rank: info.pid for rank, info in enumerate(facts.rank_info)}
    forked = connection.agent.hello_reply.ranks
    unfinished = {rank for rank, pid in forked.items() if joined.get(rank) != pid}
    connection.agent.kill_ranks(unfinished, _KILL_TIMEOUT_S)
    return unfinished


def _live_ranks(connection: Connection, engines: str, num_ranks: int) -> set[int]:
    client = connection.client
    if engines != "axon":
        client.wait_registered(range(num_ranks), _FOREIGN_REGISTRATION_TIMEOUT_S)
        return set(client.registered)
    # The controller takes a minute to miss an engine that died while no notebook could report it.
    live_ranks = set(connection.agent.hello_reply.ranks) - set(connection.agent.exits)
    client.wait_registered(live_ranks, _REGISTRATION_TIMEOUT_S)
    return live_ranks


def restart(on_progress: Callable[[str], None] = lambda _: None) -> Cluster:
    """Stop the current cluster and start one with the same options; variables on ranks are lost.

    Args:
        on_progress: As that of `start`.
    """
    session = current.session()
    old = session.require("restart")
    options: dict[str, Any] = {
        "devices": old.layout.visible or ("cpu" if old.layout.devices[0] == "cpu" else "auto"),
        "backend": old.backend,
        "engines": old.engines,
        "name": old.name,
    }
    if old.state.hosts:
        parse_hosts(old.state.hosts, old.world_size)  # while there is something to lose
    if old.connection.ip != LOOPBACK or old.state.hosts:
        folder = old.connection.folder and str(old.connection.folder.folder)
        options |= {"interface": old.connection.ip, "hosts": old.state.hosts or None, "sync": folder}
    else:
        session.prewarm.start()  # the next agent starts while the old one stops
    old.stop()
    session.drop(old)
    if old.name in {entry.name for entry in running()}:  # two notebooks that start at once may take the same name
        options["name"] = None
    return start(old.world_size, **options, on_progress=on_progress)


class ClusterEntry(Struct, frozen=True):
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
                f"Stopped the cluster {entry.name!r} ({count_of(entry.num_ranks, 'rank')}) that this "
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
        connection.client.wait_registered(alive, _DETACHED_REGISTRATION_TIMEOUT_S)
        asked = [rank for rank in sorted(alive) if rank in connection.client.registered]
        replies = request_all(connection.client, asked, CellsRequest(), timeout_s=_RANK_TIMEOUT_S)
        return [rank for rank in asked if rank not in replies or replies[rank].running]
    finally:
        connection.close()


def require(command: str) -> Cluster:
    """Return the current cluster, or reconnect to the one that this notebook's previous kernel left running.

    Args:
        command: What needs it, such as ``%push``; named in the error.

    Raises:
        NoClusterError: there is none; the message names what other kernels left.
        UsageError: the notebook left several, or one of another version.
        ClusterLostError: it ended by itself.
    """
    cluster = current.get() or take_over()
    if cluster is None:
        current.session().raise_if_lost()
        raise NoClusterError(f"`{command}`", kept=_other_clusters())
    return cluster


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
    cluster = attach(kept[0].name)
    print(
        f"Reconnected to the cluster {cluster.name!r} ({count_of(cluster.world_size, 'rank')}) that this notebook had "
        f"left running. {_holdings(cluster)}",
        flush=True,
    )
    return cluster


def _holdings(cluster: Cluster) -> str:
    """Say which variables the ranks hold."""
    replies = request_all(cluster.client, cluster.state.live_ranks, NamesRequest(), timeout_s=_HOLDINGS_TIMEOUT_S)
    names = {
        name: None
        for reply in replies.values()
        for name, known in reply.names.items()
        if name not in PREDEFINED and known.type != _MODULE
    }
    if not replies:
        return "`%distributed start` would stop it and start new ranks."
    if not names:
        return "Its ranks hold no variables."
    shown = [*names][-_MAX_NAMES:]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"Its ranks hold {', '.join(shown)}{more}."


def _other_clusters() -> str:
    """Name the detached clusters that another kernel left, as a sentence with the command; empty if there are none."""
    with contextlib.suppress(OSError):
        entries = [entry for entry in running() if entry.has_world and not entry.attached]
        if entries:
            listed = ", ".join(f"{entry.name!r} ({count_of(entry.num_ranks, 'rank')})" for entry in entries)
            return (
                f" Left running by another kernel: {listed}. Run `%distributed attach {entries[0].name}` to reconnect."
            )
    return ""
