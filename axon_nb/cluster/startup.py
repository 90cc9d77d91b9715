"""Starting, attaching to, restarting and stopping clusters."""

from __future__ import annotations

import copy
import dataclasses
import os
import time
from typing import Any

from axon_nb.cluster import current, warmup
from axon_nb.cluster.bringup import join_world, launch_engines
from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.connection import Connection, open_existing
from axon_nb.cluster.health import how_it_ended
from axon_nb.cluster.kept import end_kept, find, running
from axon_nb.cluster.layout import Layout, plan_layout
from axon_nb.cluster.owner import default_name
from axon_nb.cluster.resume import resume
from axon_nb.cluster.settings import settings
from axon_nb.errors import StartError, UsageError

__all__ = ["attach", "restart", "start"]


def start(
    n: int | None = None,
    *,
    devices: str = "auto",
    backend: str = "auto",
    engines: str | None = None,
    name: str | None = None,
) -> Cluster:
    """Start a cluster and make it the current one. Returns when every rank is in the group and one barrier has passed.

    Args:
        n: Number of ranks; None: one a free GPU, without GPUs min(4, max(2, cores)).
        devices: ``auto``, ``cpu``, or GPU numbers such as ``2,5``.
        backend: ``auto``, ``gloo`` or ``nccl``.
        engines: ipyparallel launcher; None: ``axon`` (forked ranks) on Linux, ``local`` elsewhere.
        name: What the cluster is called; several clusters of one user need different names.

    Raises:
        UsageError: the wish cannot be met.
        StartError: the ranks did not come up.
    """
    layout = plan_layout(n, devices=devices, backend=backend, threads=settings.threads)
    chosen = engines or ("axon" if hasattr(os, "fork") and os.path.isdir("/proc") else "local")
    if current.get() is not None:
        there = current.require("start")
        raise UsageError(
            f"The cluster {there.name!r} with {there.world_size} ranks is running: "
            "`%distributed stop` ends it, `%distributed restart` starts its ranks afresh."
        )
    for line in end_kept():
        print(line)
    title = _free_name(name)
    for note in layout.notes:
        print(note)
    end = time.monotonic() + settings.start_timeout
    connection = warmup.take(settings.start_timeout)
    try:
        launched = launch_engines(connection, layout, engines=chosen, timeout_s=end - time.monotonic())
        places = join_world(connection, layout, settings, timeout_s=max(1.0, end - time.monotonic()))
        cluster = _publish(connection, layout, title, chosen, places)
    except BaseException:
        connection.stop()
        raise
    cluster.launched = launched
    current.put(cluster)
    return cluster


def _publish(connection: Connection, layout: Layout, name: str, engines: str, places: list[dict[str, Any]]) -> Cluster:
    facts = {
        "name": name,
        "engines": engines,
        "world_size": layout.num_ranks,
        "keep_alive_s": settings.keep_alive,
        "layout": dataclasses.asdict(layout),
        "places": places,
    }
    connection.agent.call("set_info", info=facts)
    return Cluster(connection, layout, copy.copy(settings), name=name, engines=engines, places=places)


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

    A cell that was running goes on: its output is shown here, and `Cluster.running_cell` is its handle.

    Args:
        name: Which; None: this notebook's own, or the only one there is.

    Raises:
        UsageError: there is none, or it belongs to a notebook that is connected.
    """
    if current.get() is not None:
        there = current.require("attach")
        raise UsageError(f"This notebook has the cluster {there.name!r} already: `%distributed stop` it first.")
    entry = find(name)
    warmup.discard()
    connection = open_existing(entry.run_dir)
    greeting = connection.agent.greeting
    info = greeting["info"]
    facts = dict(info["layout"])
    layout = Layout(**{**facts, "devices": tuple(facts["devices"]), "notes": tuple(facts["notes"])})
    living = _living(connection, info["engines"], layout.num_ranks)
    if not living:
        connection.stop()
        raise StartError(f"The cluster {info['name']!r} had no rank left: `%distributed start` starts a new one.")
    cluster = Cluster(
        connection, layout, copy.copy(settings), name=info["name"], engines=info["engines"], places=info["places"]
    )
    for rank in set(cluster.ranks) - living:
        code = greeting["deaths"].get(str(rank))
        cluster.health.die(rank, "died while no notebook was connected" if code is None else how_it_ended(code))
    current.put(cluster)
    cluster.running_cell = resume(cluster, left_ns=greeting["left_ns"])
    return cluster


def _living(connection: Connection, engines: str, num_ranks: int) -> set[int]:
    client = connection.client
    if engines != "axon":
        client.wait_registered(range(num_ranks), 2.0)
        return set(client.registered)
    # The controller takes a minute to miss an engine that died while nobody was there to tell it.
    living = set(map(int, connection.agent.greeting["ranks"]))
    client.wait_registered(living, 2.0)
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
    warmup.begin()  # the next agent comes up while the old one ends
    old.stop()
    current.drop(old)
    return start(old.world_size, **shape)
