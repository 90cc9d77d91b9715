"""Turn registered engines into ranks: each gets its placement, joins the world and passes one barrier."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from axon_nb.cluster.failures.deaths import describe_death
from axon_nb.cluster.launch.compatibility import can_recover, collective_timeout, with_possible_backend
from axon_nb.cluster.launch.connection import Connection
from axon_nb.cluster.launch.placement import LOOPBACK, Layout, Placement, place_ranks
from axon_nb.cluster.rpc import requests
from axon_nb.cluster.rpc.handshake import handshake
from axon_nb.cluster.settings import Settings
from axon_nb.errors import StartError
from axon_nb.host.link.tcp import store_key
from axon_nb.records.protocol.agent import GetInfo, ServeStore
from axon_nb.records.protocol.cluster import EngineInfo
from axon_nb.records.protocol.joining import Describe, Join, JoinConfig
from axon_nb.records.protocol.version import refuse_join
from axon_nb.records.ranks import name_ranks

R = TypeVar("R")


def join_world(connection: Connection, layout: Layout, settings: Settings, *, timeout_s: float) -> list[EngineInfo]:
    """Have every rank join the world; return what each reports about itself, by rank.

    Raises:
        StartError: a rank failed to join or speaks another protocol, or not all have joined within `timeout_s`
            seconds.
    """
    client, ranks = connection.client, range(layout.num_ranks)
    end = time.monotonic() + timeout_s
    await_handshake(connection, ranks, timeout_s)
    described = gather({rank: requests.call(client, rank, Describe()) for rank in ranks}, _remaining(end), connection)
    for rank, info in described.items():
        if reason := refuse_join(rank, info.host, info.version):
            raise StartError(reason)
    placements = place_ranks(layout, [described[rank] for rank in ranks], threads_per_rank=settings.threads)
    store = store_address(connection, {info.host for info in described.values()})
    layout = with_possible_backend(layout, described.values())
    recoverable = can_recover(described.values(), layout.backend)
    joins = {
        rank: requests.call(
            client, rank, Join(join_config(layout, settings, rank, placements[rank], store, recoverable=recoverable))
        )
        for rank in ranks
    }
    joined = gather(joins, _remaining(end), connection)
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
    """Return the address of the rendezvous store for ranks on these hosts: a Unix socket here, TCP for other hosts.

    Raises:
        StartError: there are other hosts, and the cluster listens on loopback only.
    """
    if set(hosts) <= {socket.gethostname()}:
        return str(connection.run_dir.store_socket)
    joined = connection.agent.call(GetInfo()).hosts  # with `--interface lo`, agents on this machine
    if connection.ip == LOOPBACK and not set(hosts) & set(joined):
        raise StartError(
            f"There are ranks on {', '.join(sorted(hosts))}. Use `--interface NAME` to name the network interface on "
            "which they reach this host."
        )
    key = store_key(connection.client.session.key)
    port = connection.agent.call(ServeStore(connection.ip, key.hex())).port
    return f"tcp:{connection.ip}:{port}"


def join_config(
    layout: Layout, settings: Settings, rank: int, placement: Placement, store: str, *, recoverable: bool
) -> JoinConfig:
    """Return how `rank` joins."""
    return JoinConfig(
        **dataclasses.asdict(placement),
        rank=rank,
        world_size=layout.num_ranks,
        backend=layout.backend,
        store=store,
        timeout_s=collective_timeout(settings, recoverable=recoverable),
        recoverable=recoverable,
        output_limit=settings.output_limit,
        group_memory=settings.group_memory,
    )


def gather(futures: Mapping[int, Future[R]], timeout_s: float, connection: Connection) -> dict[int, R]:
    """Return the results of one future per rank; stops early if a rank exits or the agent is gone.

    Raises:
        StartError: a rank failed or exited, the agent is gone, or `timeout_s` seconds have passed.
    """
    end = time.monotonic() + timeout_s
    _wait(futures.values(), lambda: _any_exited(connection, futures) or time.monotonic() > end)
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


def _wait(futures: Iterable[Future[Any]], give_up: Callable[[], bool]) -> None:
    for future in futures:
        while not future.done() and not give_up():
            try:
                future.exception(0.05)
            except Exception:  # not done yet; the caller raises failures, naming the rank
                continue
