"""From a connection to ranks that have joined their world: engines launched, registered, joined, one barrier passed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from importlib.metadata import entry_points
from typing import Any

import ipyparallel as ipp

from axon_nb.cluster import remote
from axon_nb.cluster.connection import Connection
from axon_nb.cluster.launcher import AgentControllerLauncher, ForkedEngineSetLauncher
from axon_nb.cluster.layout import Layout
from axon_nb.cluster.settings import Settings
from axon_nb.errors import StartError, UsageError

__all__ = ["gather", "join_settings", "join_world", "launch_engines", "launcher_class", "rank_environment"]

_BOOTSTRAP = "axon_nb.engine.bootstrap"


def launch_engines(connection: Connection, layout: Layout, *, engines: str, timeout_s: float) -> ipp.Cluster:
    """Launch one engine a rank with the ipyparallel launcher called `engines`, and wait until all are registered.

    Raises:
        StartError: one ended or did not register within `timeout_s` seconds; the message has its last lines.
    """
    run_dir = connection.run_dir
    cluster = ipp.Cluster(
        engines=launcher_class(engines),
        controller=AgentControllerLauncher,
        profile_dir=str(run_dir.profile),
        cluster_id="",
        cluster_file="",
        load_profile=False,
        shutdown_atexit=False,
        delay=0.0,
        log=logging.getLogger("axon_nb.ipyparallel"),
        parent=None,
    )
    cluster.start_controller_sync()
    options: dict[str, Any] = {"engine_set_id": "ranks"}
    env = rank_environment(layout)
    if engines == "axon":
        options |= {"agent": connection.agent, "rank_env": env}
    else:
        options |= {"environment": env}
        _precreate_logs(connection, layout.num_ranks)
    deaths: dict[int, int] = {}
    connection.agent.on_event(
        lambda event: deaths.update({event["rank"]: event["code"]} if event["event"] == "exit" else {})
    )
    try:
        cluster.start_engines_sync(layout.num_ranks, **options)
    except Exception as error:
        raise StartError(f"The engine launcher {engines!r} failed: {error}") from error
    end = time.monotonic() + timeout_s
    wanted = set(range(layout.num_ranks))
    while not connection.client.wait_registered(wanted, 0.1):
        _raise_if_dead(connection, deaths)
        _raise_if_ended(cluster.engines["ranks"])
        if time.monotonic() > end:
            there = connection.client.registered
            raise StartError(f"Only engines {there} of {sorted(wanted)} registered within {timeout_s:.0f} s.")
    return cluster


def launcher_class(engines: str) -> Any:
    """The ipyparallel launcher of that name.

    Raises:
        UsageError: nobody has registered it.
    """
    if engines == "axon":
        return ForkedEngineSetLauncher
    known = {point.name: point for point in entry_points(group="ipyparallel.engine_launchers")}
    if engines.lower() not in known:
        raise UsageError(
            f"--engines {engines}: no ipyparallel launcher of that name; there are {', '.join(sorted(known))}."
        )
    return known[engines.lower()].load()


def rank_environment(layout: Layout) -> dict[str, str]:
    """Environment variables of ranks besides the notebook's own."""
    env = {"OMP_NUM_THREADS": str(layout.threads)}
    if layout.visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = layout.visible
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi numbers the cards, which named them
    return env


def _precreate_logs(connection: Connection, num_ranks: int) -> None:
    # ipyparallel opens its logs with the user's umask; a file that is there keeps its mode.
    folder = connection.run_dir.profile / "log"
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in [*(f"ipengine--ranks-{index}" for index in range(num_ranks)), f"ipengine-ranks-{os.getpid()}"]:
        path = folder / f"{name}.log"
        path.touch(mode=0o600)
        path.chmod(0o600)


def _raise_if_dead(connection: Connection, deaths: dict[int, int]) -> None:
    if connection.agent.closed.is_set():
        raise StartError("The host agent ended while the ranks were starting.")
    for rank, code in deaths.items():
        log = connection.run_dir.profile / "log" / f"rank{rank}.log"
        lines = log.read_text(errors="replace").strip().splitlines()[-5:] if log.exists() else []
        raise StartError(
            f"Rank {rank} ended with code {code} while starting: {' | '.join(lines) or 'it wrote nothing'}"
        )


def _raise_if_ended(launcher: Any) -> None:
    """Notice processes that ipyparallel's own launchers started on this host and that are gone again."""
    parts = list(getattr(launcher, "launchers", {}).values()) or [launcher]
    for part in parts:
        process = getattr(part, "process", None)
        if process is not None and not process.is_running():
            text = str(part.get_output()).strip().splitlines()
            lines = [line for line in text if "Error" in line][-1:] or text[-5:]
            raise StartError(f"An engine ended while starting: {' | '.join(lines) or 'it wrote nothing'}")


def join_world(connection: Connection, layout: Layout, settings: Settings, *, timeout_s: float) -> list[dict[str, Any]]:
    """Have every rank join; returns what each says of itself (host, pid, device), by rank.

    Raises:
        StartError: a rank failed to join, or the world did not form within `timeout_s` seconds.
    """
    client, ranks = connection.client, range(layout.num_ranks)
    places = gather(
        {rank: remote.call(client, rank, f"{_BOOTSTRAP}:describe") for rank in ranks}, timeout_s, connection
    )
    hosts = list(dict.fromkeys(places[rank]["host"] for rank in ranks))
    if len(hosts) > 1:
        raise StartError(
            f"The ranks are on {len(hosts)} hosts ({', '.join(hosts)}); a cluster spans one host in this version."
        )
    joins = {
        rank: remote.call(client, rank, f"{_BOOTSTRAP}:join", **join_settings(connection, layout, settings, rank))
        for rank in ranks
    }
    answers = gather(joins, timeout_s, connection)
    return [answers[rank] for rank in ranks]


def join_settings(connection: Connection, layout: Layout, settings: Settings, rank: int) -> dict[str, Any]:
    """How `rank` joins: the fields of the engine's `JoinConfig`."""
    return {
        "rank": rank,
        "world_size": layout.num_ranks,
        "local_rank": rank,
        "local_world_size": layout.num_ranks,
        "node_rank": 0,
        "backend": layout.backend,
        "store": str(connection.run_dir.store_socket),
        "device": layout.devices[rank],
        "threads": layout.threads,
        "timeout_s": settings.collective_timeout,
        "output_limit": settings.output_limit,
    }


def gather(futures: dict[int, Future[Any]], timeout_s: float, connection: Connection) -> dict[int, Any]:
    """The results of one future a rank; ends early when the cluster is gone.

    Raises:
        StartError: a rank failed, the agent is gone, or the time is over.
    """
    end = time.monotonic() + timeout_s
    _wait(futures.values(), lambda: connection.agent.closed.is_set() or time.monotonic() > end)
    answers = {}
    for rank, future in futures.items():
        if not future.done():
            reason = "the host agent is gone" if connection.agent.closed.is_set() else f"no answer in {timeout_s:.0f} s"
            raise StartError(f"Rank {rank} did not join: {reason}.")
        try:
            answers[rank] = future.result()
        except Exception as error:
            raise StartError(f"Rank {rank} could not join: {error}") from None
    return answers


def _wait(futures: Iterable[Future[Any]], give_up: Callable[[], bool]) -> None:
    for future in futures:
        while not future.done() and not give_up():
            try:
                future.exception(0.05)
            except Exception:  # not done yet; a failure is raised by the caller, who names the rank
                continue
