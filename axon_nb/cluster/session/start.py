"""Starting, attaching to, restarting and stopping clusters."""

from __future__ import annotations

import os
import sys
import time

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.failures.deaths import describe_death
from axon_nb.cluster.launch import compatibility, prewarm
from axon_nb.cluster.launch.connection import Connection, default_name, open_existing, open_new, owner_id
from axon_nb.cluster.launch.engines import launch_engines, stop_engines
from axon_nb.cluster.launch.join import join_world
from axon_nb.cluster.launch.open_files import raise_if_too_few
from axon_nb.cluster.launch.placement import LOOPBACK, Layout, interface_ip, plan_layout
from axon_nb.cluster.rpc.handshake import hear
from axon_nb.cluster.session import current
from axon_nb.cluster.session.discovery import end_kept, find, running
from axon_nb.cluster.session.reattach import resume
from axon_nb.cluster.settings import Settings, settings, settings_facts
from axon_nb.cluster.state import ClusterState
from axon_nb.errors import StartError, UsageError
from axon_nb.records.protocol.agent import SetInfo
from axon_nb.records.protocol.joining import ClusterFacts, Place
from axon_nb.records.protocol.version import own_version
from axon_nb.records.protocol.wire import decode, encode

__all__ = ["attach", "restart", "start"]

_REGISTERED_S = 20.0
"""The controller tells a new client of engines within milliseconds; longer on a machine that is busy."""
_HEARD_S = 5.0
"""For output to come to a new client; longer only where all ranks are in C code that keeps Python's lock."""


def start(
    n: int | None = None,
    *,
    devices: str = "auto",
    backend: str = "auto",
    engines: str | None = None,
    name: str | None = None,
    interface: str | None = None,
) -> Cluster:
    """Start a cluster and make it the current one. Returns when every rank is in the group and one barrier has passed.

    Args:
        n: Number of ranks; None: one a free GPU, without GPUs min(4, max(2, cores)).
        devices: ``auto``, ``cpu``, or GPU numbers such as ``2,5``.
        backend: ``auto``, ``gloo`` or ``nccl``.
        engines: ipyparallel launcher; None: ``axon`` (forked ranks) on Linux, ``local`` elsewhere.
        name: What the cluster is called; several clusters of one user need different names.
        interface: Network interface of this host, or its IPv4 address, on which ranks on other hosts reach it; None:
            all ranks are here, and nothing but loopback and Unix sockets listens.

    Raises:
        UsageError: the wish cannot be met.
        StartError: the ranks did not come up.
    """
    ip = LOOPBACK if interface is None else interface_ip(interface)
    several_hosts = interface is not None
    chosen_settings = settings.snapshot()
    layout = plan_layout(
        n, devices=devices, backend=backend, threads=chosen_settings.threads, several_hosts=several_hosts
    )
    chosen = engines or ("axon" if hasattr(os, "fork") and os.path.isdir("/proc") else "local")
    if current.get() is not None:
        there = current.require("start")
        raise UsageError(
            f"The cluster {there.name!r} with {there.world_size} ranks is running: "
            "`%distributed stop` ends it, `%distributed restart` starts its ranks afresh."
        )
    for line in end_kept():
        print(line)
    if several_hosts and chosen in ("axon", "local"):
        raise UsageError(
            f"--interface {interface}: the launcher {chosen!r} starts ranks on this host alone; see --engines."
        )
    title = _free_name(name)
    raise_if_too_few(layout.num_ranks)
    for note in layout.notes:
        print(note)
    end = time.monotonic() + chosen_settings.start_timeout
    if several_hosts:
        prewarm.discard()
        connection = open_new(ip=ip)
        print(f"The controller, the rendezvous store and Gloo listen on {ip} for ranks on other hosts.")
    else:
        connection = prewarm.take(chosen_settings.start_timeout)
    launched = None
    try:
        launched = launch_engines(connection, layout, engines=chosen, timeout_s=end - time.monotonic())
        places = join_world(connection, layout, chosen_settings, timeout_s=max(1.0, end - time.monotonic()))
        limit_s = compatibility.collective_timeout(chosen_settings, recoverable=False)
        for note in compatibility.at_start(places, layout.backend, timeout_s=limit_s):
            print(note, file=sys.stderr)
        cluster = _publish(connection, layout, chosen_settings, name=title, engines=chosen, places=places)
    except BaseException:
        if launched is not None:
            stop_engines(launched, chosen)
        connection.stop()
        raise
    cluster.state.launched = launched
    current.put(cluster)
    return cluster


def _publish(
    connection: Connection,
    layout: Layout,
    own: Settings,
    *,
    name: str,
    engines: str,
    places: list[Place],
) -> Cluster:
    facts = ClusterFacts(
        name=name,
        engines=engines,
        ip=connection.ip,
        world_size=layout.num_ranks,
        version=own_version(),
        **settings_facts(own),
        layout=encode(layout),
        places=tuple(places),
        owner=owner_id(),
    )
    connection.agent.call(SetInfo(encode(facts)))
    return Cluster(ClusterState(connection, layout, own, name=name, engines=engines, places=places))


def _free_name(name: str | None) -> str:
    taken = {entry.name for entry in running()}
    if name is not None:
        if name in taken:
            raise UsageError(
                f"A cluster {name!r} is running already: `%distributed attach {name}`, or choose another name."
            )
        return name
    base, number = default_name(), 1
    while (candidate := base if number == 1 else f"{base}-{number}") in taken:
        number += 1
    return candidate


def attach(name: str | None = None) -> Cluster:
    """Get back a cluster whose kernel was restarted or has died, with everything on its ranks.

    A cell that was running goes on: its output is shown here, and `Cluster.running_cell` is its handle. The cluster's
    settings become those of this notebook, except those that have been set here.

    Args:
        name: Which; None: this notebook's own, or the only one there is.

    Raises:
        UsageError: there is none, it belongs to a notebook that is connected, or its ranks run another version.
    """
    if current.get() is not None:
        there = current.require("attach")
        raise UsageError(f"This notebook has the cluster {there.name!r} already: `%distributed stop` it first.")
    entry = find(name)
    prewarm.discard()
    connection = open_existing(entry.run_dir)
    hello_reply = connection.agent.hello_reply
    facts: ClusterFacts = decode(ClusterFacts, hello_reply.info)
    layout: Layout = decode(Layout, facts.layout)
    living = _living(connection, facts.engines, layout.num_ranks)
    if not living:
        connection.stop()
        raise StartError(f"The cluster {facts.name!r} had no rank left: `%distributed start` starts a new one.")
    hear(connection.client, living, timeout_s=_HEARD_S)
    own = settings.take_over(dict(facts.settings))
    cluster = Cluster(
        ClusterState(connection, layout, own, name=facts.name, engines=facts.engines, places=facts.places)
    )
    for rank in set(cluster.ranks) - living:
        event = hello_reply.deaths.get(rank)
        cluster.health.die(rank, "died while no notebook was connected" if event is None else describe_death(event))
    current.put(cluster)
    settings.act_again()
    cluster.running_cell = resume(cluster.cells, left_ns=hello_reply.left_ns)
    return cluster


def _living(connection: Connection, engines: str, num_ranks: int) -> set[int]:
    client = connection.client
    if engines != "axon":
        client.wait_registered(range(num_ranks), 2.0)
        return set(client.registered)
    # The controller takes a minute to miss an engine that died while nobody was there to tell it.
    living = set(connection.agent.hello_reply.ranks)
    client.wait_registered(living, _REGISTERED_S)
    return living


def restart() -> Cluster:
    """Stop the current cluster and start one of the same shape; variables on ranks are lost."""
    old = current.require("restart")
    shape = {
        "devices": old.layout.visible or ("cpu" if old.layout.devices[0] == "cpu" else "auto"),
        "backend": old.backend,
        "engines": old.engines,
        "name": old.name,
    }
    if old.connection.ip != LOOPBACK:
        shape["interface"] = old.connection.ip
    else:
        prewarm.begin()  # the next agent comes up while the old one ends
    old.stop()
    current.drop(old)
    return start(old.world_size, **shape)
