"""Start, reattach to and restart clusters."""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.endpoint.server import Endpoint
from axon_nb.cluster.failures.deaths import describe_death
from axon_nb.cluster.launch import compatibility
from axon_nb.cluster.launch.connection import Connection, default_name, open_existing, open_new
from axon_nb.cluster.launch.engines import launch_engines, launcher_class, stop_engines
from axon_nb.cluster.launch.host_agents import await_hosts
from axon_nb.cluster.launch.hosts import own_address, parse_hosts
from axon_nb.cluster.launch.join import join_world
from axon_nb.cluster.launch.open_files import raise_if_too_few
from axon_nb.cluster.launch.placement import LOOPBACK, Layout, plan_layout
from axon_nb.cluster.launch.quota import raise_if_over_quota
from axon_nb.cluster.rpc.handshake import wait_for_output
from axon_nb.cluster.session import current
from axon_nb.cluster.session.discovery import find, raise_if_busy, running, stop_detached
from axon_nb.cluster.session.notebook import NotebookSession
from axon_nb.cluster.session.reattach import reattach_cells
from axon_nb.cluster.settings import settings_facts
from axon_nb.cluster.state import ClusterState
from axon_nb.errors import StartError, UsageError
from axon_nb.records.protocol.agent import ReserveGpus, SetInfo
from axon_nb.records.protocol.cluster import ClusterFacts
from axon_nb.records.protocol.version import own_version
from axon_nb.records.protocol.wire import decode, encode
from axon_nb.troubleshooting import more

_REGISTRATION_TIMEOUT_S = 20.0
"""The controller reports engines to a new client within milliseconds; it takes longer on a busy machine."""
_OUTPUT_TIMEOUT_S = 5.0
"""For output to reach a new client; it takes longer only if all ranks are in C code that holds the GIL."""
_KILL_TIMEOUT_S = 10.0
_UNFINISHED = "was being replaced when its notebook was killed"
_FOREIGN_REGISTRATION_TIMEOUT_S = 2.0
"""For engines of other launchers, of which it is unknown how many are alive."""


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
    force: bool = False,
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
        hosts: Other hosts that run ranks, too: ``ssh:a,b``, ``slurm`` or ``slurm:JOB``, ``join`` or ``join:2``; None:
            there are none.
        force: Whether to stop ranks that this notebook left running even while a cell runs there.

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
    launcher_class(launcher)
    others = None if hosts is None else parse_hosts(hosts, layout.num_ranks)
    ip = own_address(interface, others, launcher)
    if _make_room(session, force=force):
        layout = plan()  # with the GPUs that are free now
    cluster_name = _free_name(name)
    raise_if_too_few(layout.num_ranks)
    raise_if_over_quota(layout.num_ranks)
    for note in layout.notes:
        print(note)
    if not several_hosts:
        connection = session.prewarm.take(chosen_settings.start_timeout)
    else:
        session.prewarm.discard()
        connection = open_new(ip=ip or LOOPBACK)
        if note := compatibility.unencrypted():
            print(note, file=sys.stderr)
        print(f"The controller, the rendezvous store and Gloo listen on {ip} for ranks on other hosts.")
    launched = None
    try:
        if layout.reserves:
            _reserve_gpus(connection, layout, cluster_name, shares=devices != "auto")
        if others is not None:
            layout = await_hosts(connection, layout, others, timeout_s=chosen_settings.start_timeout)
        end = time.monotonic() + chosen_settings.start_timeout
        launched = launch_engines(connection, layout, engines=launcher, timeout_s=chosen_settings.start_timeout)
        rank_info = join_world(connection, layout, chosen_settings, timeout_s=max(1.0, end - time.monotonic()))
        layout = compatibility.with_possible_backend(layout, rank_info)
        timeout_s = compatibility.collective_timeout(chosen_settings, recoverable=False)
        for note in compatibility.at_start(rank_info, layout.backend, timeout_s=timeout_s):
            print("\n".join([note, *more(note)]), file=sys.stderr)
        facts = ClusterFacts(
            name=cluster_name,
            engines=launcher,
            ip=connection.ip,
            hosts=hosts or "",
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
            stop_engines(launched, launcher)
        connection.stop()
        raise
    cluster.state.launched = launched
    session.put(cluster)
    Endpoint(cluster, lambda: session.settings.share).start()
    return cluster


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
        ranks = "1 rank" if existing.world_size == 1 else f"{existing.world_size} ranks"
        raise UsageError(
            f"The cluster {existing.name!r} with {ranks} is running. Run `%distributed stop` to stop it, or "
            "`%distributed restart` to restart its ranks."
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
    cluster = session.new_cluster(ClusterState(connection, layout, settings, facts))
    for rank in set(cluster.ranks) - live_ranks:
        event = hello_reply.deaths.get(rank)
        reason = "died while no notebook was connected" if event is None else describe_death(event)
        cluster.health.mark_dead(rank, _UNFINISHED if rank in unfinished else reason)
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


def restart() -> Cluster:
    """Stop the current cluster and start one with the same options; variables on ranks are lost."""
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
        options |= {"interface": old.connection.ip, "hosts": old.state.hosts or None}
    else:
        session.prewarm.start()  # the next agent starts while the old one stops
    old.stop()
    session.drop(old)
    return start(old.world_size, **options)
