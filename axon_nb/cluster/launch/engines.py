"""Launch one engine per rank, forked by the host agent or as a plain process, and join the engines into a world.

Once all are registered, each gets its placement, joins the world and passes one barrier.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import ipyparallel as ipp
import psutil
from ipyparallel.cluster.launcher import LocalEngineSetLauncher
from msgspec.structs import asdict
from traitlets.config import Config

from axon_nb.cluster import rpc
from axon_nb.cluster.failures import describe_death
from axon_nb.cluster.launch.compatibility import can_recover, collective_timeout, with_possible_backend
from axon_nb.cluster.launch.connection import Connection
from axon_nb.cluster.launch.launchers import AgentControllerLauncher, fork_engines
from axon_nb.cluster.launch.placement import Layout, place_ranks, rank_environment
from axon_nb.cluster.rpc import RankClient, handshake
from axon_nb.cluster.settings import Settings
from axon_nb.errors import ClusterLostError, StartError, UsageError
from axon_nb.host.client import last_lines
from axon_nb.host.connections import store_key
from axon_nb.records.protocol.agent import EngineInfo, ServeStore
from axon_nb.records.protocol.recovery import Describe, Join, JoinConfig, Placement
from axon_nb.records.protocol.wire import RankCall, refuse_join
from axon_nb.records.ranks import name_ranks

LAUNCHERS = ("axon", "local")
"""Forked by the host agent; and ipyparallel's own, where nothing can be forked."""
_SHUTDOWN_S = 30.0
ANSWER_S, COPY_S, STATES_S = 30.0, 60.0, 600.0
"""How long to wait for ranks that answer or join, that copy variables, and that stage or restore states."""
"""Seconds for the engines to exit before their controller does.

An engine's ipyparallel nanny never exits if the controller goes while a reply to it is on the way (its control socket
lingers forever; seen with 9.1), so a busy machine gets time.
"""
R = TypeVar("R")


def launch_engines(
    connection: Connection, layout: Layout, *, engines: str, timeout_s: float, on_registered: Callable[[int], None]
) -> ipp.Cluster | None:
    """Launch one engine per rank with the launcher called `engines`, and wait until all are registered.

    `on_registered` is called with their number so far.

    Returns:
        ipyparallel's object that launched the engines; None: the host agent has forked them.

    Raises:
        StartError: one exited or did not register within `timeout_s` seconds; the message has its last lines.
    """
    end = time.monotonic() + timeout_s
    launched = None if engines == "axon" else _local_cluster(connection)
    try:
        if launched is None:
            fork_engines(connection.agent, layout, range(layout.num_ranks))
        else:
            _start_engines(launched, connection, layout)
        _await_engines(connection, launched, layout.num_ranks, on_registered, timeout_s=_remaining(end))
    except ClusterLostError as error:
        raise StartError(connection.agent.end_reason or str(error)) from None
    except BaseException:
        if launched is not None:
            stop_engines(launched)
        raise
    return launched


def _local_cluster(connection: Connection) -> ipp.Cluster:
    cluster = ipp.Cluster(
        engines=LocalEngineSetLauncher,
        controller=AgentControllerLauncher,
        profile_dir=str(connection.run_dir.profile),
        cluster_id="",
        cluster_file="",
        load_profile=False,
        shutdown_atexit=False,
        delay=0.0,
        log=logging.getLogger("axon_nb.ipyparallel"),
        parent=None,
        config=Config(),
    )
    cluster.start_controller_sync()
    return cluster


def _start_engines(cluster: ipp.Cluster, connection: Connection, layout: Layout) -> None:
    if layout.visible_by_rank:
        raise UsageError("--engines local gives all ranks one MIG instance: use `--engines axon`, or `-n 1`.")
    _precreate_logs(connection, layout.num_ranks)
    try:
        cluster.start_engines_sync(layout.num_ranks, engine_set_id="ranks", environment=rank_environment(layout))
    except Exception as error:
        raise StartError(f"The engine launcher 'local' failed: {error}") from error


def _await_engines(
    connection: Connection,
    launched: ipp.Cluster | None,
    count: int,
    on_registered: Callable[[int], None],
    *,
    timeout_s: float,
) -> None:
    end, known = time.monotonic() + timeout_s, 0
    while not connection.client.wait_registered(range(count), 0.1):
        registered = connection.client.registered
        if len(registered) > known:
            on_registered(known := len(registered))
        _raise_if_dead(connection)
        if launched is not None:
            _raise_if_engine_exited(launched.engines["ranks"])
        if time.monotonic() > end:
            output = "" if launched is None else _last_output(launched.engines["ranks"])
            raise StartError(
                f"Only engines {registered} of {list(range(count))} registered within {timeout_s:.0f} s"
                f"{f'; output of the launcher: {output}' if output else '.'}"
            )
    on_registered(count)


def stop_engines(launched: ipp.Cluster) -> None:
    """Stop the engines that ipyparallel has launched; the host agent stops its own."""
    with contextlib.suppress(Exception):  # whatever is left exits once it misses the controller's heartbeat
        launched.stop_engines_sync()


def shut_down_foreign(client: RankClient, launched: ipp.Cluster | None, *, engines: str, num_ranks: int) -> None:
    """Stop the engines of other launchers than ours; the host agent stops its own.

    Args:
        client: The cluster's client.
        launched: ipyparallel's object that launched the engines; None: another process launched them.
        engines: Name of the launcher.
        num_ranks: How many engines there are.
    """
    if launched is not None:
        stop_engines(launched)
    elif engines != "axon":
        with contextlib.suppress(Exception):
            client.shutdown(targets="all", hub=False, block=False)
            # If the client closes before the request is sent, the request is lost.
            client.wait_unregistered(range(num_ranks), _SHUTDOWN_S)


def check_launcher(engines: str) -> None:
    """Check `--engines`.

    Raises:
        UsageError: no launcher has that name.
    """
    if engines not in LAUNCHERS:
        raise UsageError(
            f"--engines must be axon or local; got {engines}. For ranks on other hosts, use `--hosts ssh:NAME`, "
            "`--hosts slurm`, `--hosts mpi:NAME` or `--hosts join`."
        )


def _precreate_logs(connection: Connection, num_ranks: int) -> None:
    # ipyparallel opens its logs with the user's umask; an existing file keeps its mode.
    folder = connection.run_dir.profile / "log"
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in [*(f"ipengine--ranks-{index}" for index in range(num_ranks)), f"ipengine-ranks-{os.getpid()}"]:
        path = folder / f"{name}.log"
        path.touch(mode=0o600)
        path.chmod(0o600)


def _raise_if_dead(connection: Connection) -> None:
    if connection.agent.closed.is_set():
        raise StartError(connection.agent.end_reason or "The host agent exited while the ranks were starting.")
    for rank, event in list(connection.agent.exits.items()):
        said = last_lines(connection.run_dir.profile / "log" / f"rank{rank}.log", 5) or "it printed nothing"
        raise StartError(f"Rank {rank} exited with code {event.code} while starting: {said}")


def _raise_if_engine_exited(launcher: Any) -> None:
    """Check the processes that ipyparallel's own launchers started on this host."""
    # A set of engines drops those whose exit it noticed, which it does while an event loop runs, as in a notebook.
    stopped = getattr(launcher, "stop_data", None)
    for identifier in list(stopped.get("engines", ())) if isinstance(stopped, dict) else []:
        raise _exit_error(identifier, _last_lines(launcher.outputs.get(identifier) or ""))
    for identifier, part in launcher.launchers.items():
        process = getattr(part, "process", None)
        if process is not None and (not process.is_running() or _is_zombie(process)):
            raise _exit_error(identifier, _output(part))


def _exit_error(engine: object, output: str) -> StartError:
    return StartError(f"Engine {engine} exited while starting: {output or 'it printed nothing'}")


def _is_zombie(process: psutil.Process) -> bool:
    # Its parent has not waited for it yet, so psutil reports it as running.
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _last_output(launcher: Any) -> str:
    """Return what an engine that ipyparallel has launched printed last; empty if there is none."""
    with contextlib.suppress(Exception):  # files that do not exist yet
        parts = [part for part in launcher.launchers.values() if getattr(part, "process", None) is not None]
        return next(filter(None, map(_output, parts)), "")
    return ""


def _output(part: Any) -> str:
    # Not `get_output` first: if ipyparallel's thread removes the file meanwhile, that loses the text for both.
    try:
        return _last_lines(Path(part.output_file).read_text(errors="replace"))
    except OSError:  # ipyparallel has read and removed it
        return _last_lines(str(part.get_output()))


def _last_lines(output: str) -> str:
    text = output.strip().splitlines()
    return " | ".join([line for line in text if "Error" in line][-1:] or text[-5:])


def join_world(connection: Connection, layout: Layout, settings: Settings, *, timeout_s: float) -> list[EngineInfo]:
    """Have every rank join the world; return what each reports about itself, by rank.

    Raises:
        StartError: a rank failed to join or speaks another protocol, or not all have joined within `timeout_s`
            seconds.
    """
    ranks, end = range(layout.num_ranks), time.monotonic() + timeout_s
    await_handshake(connection, ranks, timeout_s)
    described = ask(connection, dict.fromkeys(ranks, Describe()), within=_remaining(end))
    for rank, info in described.items():
        if reason := refuse_join(f"Rank {rank} on {info.host}", info.version):
            raise StartError(reason)
    placements = place_ranks(layout, [described[rank] for rank in ranks], threads_per_rank=settings.threads)
    store = store_address(connection, {info.host for info in described.values()})
    layout = with_possible_backend(layout, described.values())
    recoverable = can_recover(described.values(), layout.backend)
    joins = {
        rank: Join(join_config(layout, settings, rank, placements[rank], store, recoverable=recoverable))
        for rank in ranks
    }
    joined = ask(connection, joins, within=_remaining(end))
    return [joined[rank] for rank in ranks]


def await_handshake(connection: Connection, ranks: Iterable[int], timeout_s: float) -> None:
    """Wait until all channels of newly registered ranks are connected: what is sent before is lost.

    Raises:
        StartError: a rank exited or did not reply within `timeout_s` seconds, or the cluster is gone.
    """
    ranks = list(ranks)
    missed = handshake(connection.client, ranks, timeout_s=timeout_s, give_up=lambda: _any_exited(connection, ranks))
    if missed:
        raise_if_exited(connection, ranks)
        raise StartError(f"{name_ranks(missed).capitalize()} did not join: {_no_reply_reason(connection, timeout_s)}.")


def store_address(connection: Connection, hosts: Collection[str]) -> str:
    """Return the address of the rendezvous store for ranks on these hosts: a Unix socket here, TCP for other hosts."""
    if set(hosts) <= {socket.gethostname()}:
        return str(connection.run_dir.store_socket)
    key = store_key(connection.client.session.key)
    port = connection.agent.call(ServeStore(connection.ip, key.hex())).port
    return f"tcp:{connection.ip}:{port}"


def join_config(
    layout: Layout, settings: Settings, rank: int, placement: Placement, store: str, *, recoverable: bool
) -> JoinConfig:
    """Return how `rank` joins."""
    return JoinConfig(
        **asdict(placement),
        rank=rank,
        world_size=layout.num_ranks,
        backend=layout.backend,
        store=store,
        timeout_s=collective_timeout(settings, recoverable=recoverable),
        recoverable=recoverable,
        output_limit=settings.output_limit,
        group_memory=settings.group_memory,
    )


def ask(connection: Connection, calls: Mapping[int, RankCall[R]], *, within: float = ANSWER_S) -> dict[int, R]:
    """Make a call on each rank and return the results; see `gather`.

    Raises:
        StartError: a rank failed or exited, the agent is gone, or `within` seconds have passed.
    """
    return gather({rank: rpc.call(connection.client, rank, call) for rank, call in calls.items()}, within, connection)


def gather(futures: Mapping[int, Future[R]], timeout_s: float, connection: Connection) -> dict[int, R]:
    """Return the results of one future per rank; stops early if a rank exits or the agent is gone.

    Raises:
        StartError: a rank failed or exited, the agent is gone, or `timeout_s` seconds have passed.
    """
    end = time.monotonic() + timeout_s
    _wait_for_replies(futures.values(), lambda: _any_exited(connection, futures) or time.monotonic() > end)
    if not all(future.done() for future in futures.values()):
        raise_if_exited(connection, futures)
    results = {}
    for rank, future in futures.items():
        if not future.done():
            raise StartError(f"Rank {rank} did not join: {_no_reply_reason(connection, timeout_s)}.")
        try:
            results[rank] = future.result()
        except Exception as error:
            raise StartError(f"Rank {rank} failed to join: {error}") from None
    return results


def _any_exited(connection: Connection, ranks: Iterable[int]) -> bool:
    return connection.agent.closed.is_set() or any(rank in connection.agent.exits for rank in ranks)


def raise_if_exited(connection: Connection, ranks: Iterable[int]) -> None:
    """Raise if one of these ranks has exited.

    Raises:
        StartError: which, and how.
    """
    for rank in ranks:
        if event := connection.agent.exits.get(rank):
            raise StartError(f"Rank {rank} failed to start: it {describe_death(event)}.")


def _no_reply_reason(connection: Connection, timeout_s: float) -> str:
    return "the host agent is gone" if connection.agent.closed.is_set() else f"no reply within {timeout_s:.0f} s"


def _remaining(end: float) -> float:
    return max(1.0, end - time.monotonic())


def _wait_for_replies(futures: Iterable[Future[Any]], give_up: Callable[[], bool]) -> None:
    for future in futures:
        while not future.done() and not give_up():
            try:
                future.exception(0.05)
            except Exception:  # not done yet; the caller raises failures, naming the rank
                continue
