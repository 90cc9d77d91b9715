"""From engines to ranks that have joined their world: each told its place, one barrier passed."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from axon_nb.cluster.failures.deaths import describe_death
from axon_nb.cluster.launch.compatibility import can_recover, collective_timeout
from axon_nb.cluster.launch.connection import Connection
from axon_nb.cluster.launch.placement import LOOPBACK, Layout, Seat, seats
from axon_nb.cluster.rpc import requests
from axon_nb.cluster.rpc.handshake import reach
from axon_nb.cluster.settings import Settings
from axon_nb.errors import StartError
from axon_nb.host.store_tcp import store_key
from axon_nb.records.protocol.agent import ServeStore
from axon_nb.records.protocol.joining import Describe, Join, JoinConfig, Place
from axon_nb.records.protocol.version import refuse_join
from axon_nb.records.ranks import format_ranks

__all__ = ["await_reached", "gather", "join_config", "join_world", "store_address"]


R = TypeVar("R")


def join_world(connection: Connection, layout: Layout, settings: Settings, *, timeout_s: float) -> list[Place]:
    """Have every rank join; returns what each says of itself, by rank.

    Raises:
        StartError: a rank failed to join or speaks another protocol, or the world did not form within `timeout_s`
            seconds.
    """
    client, ranks = connection.client, range(layout.num_ranks)
    end = time.monotonic() + timeout_s
    await_reached(connection, ranks, timeout_s)
    places = gather({rank: requests.call(client, rank, Describe()) for rank in ranks}, _left(end), connection)
    for rank, place in places.items():
        if why := refuse_join(rank, place.host, place.version):
            raise StartError(why)
    seated = seats(layout, [places[rank] for rank in ranks], given_threads=settings.threads)
    store = store_address(connection, {place.host for place in places.values()})
    recoverable = can_recover(places.values(), layout.backend)
    joins = {
        rank: requests.call(
            client, rank, Join(join_config(layout, settings, rank, seated[rank], store, recoverable=recoverable))
        )
        for rank in ranks
    }
    answers = gather(joins, _left(end), connection)
    return [answers[rank] for rank in ranks]


def await_reached(connection: Connection, ranks: Iterable[int], timeout_s: float) -> None:
    """Wait until all channels of ranks that have just registered are up: what is sent before is lost.

    Raises:
        StartError: one was not reached within `timeout_s` seconds or has ended, or the cluster is gone.
    """
    ranks = list(ranks)
    if missed := reach(connection.client, ranks, timeout_s=timeout_s, give_up=lambda: _over(connection, ranks)):
        _raise_if_ended(connection, ranks)
        raise StartError(f"Ranks {format_ranks(missed)} did not join: {_why(connection, timeout_s)}.")


def store_address(connection: Connection, hosts: Collection[str]) -> str:
    """Where ranks on these hosts find the rendezvous store: a Unix socket on this host, TCP from others.

    Raises:
        StartError: there are others, and the cluster listens on loopback alone.
    """
    if set(hosts) <= {socket.gethostname()}:
        return str(connection.run_dir.store_socket)
    if connection.ip == LOOPBACK:
        raise StartError(
            f"There are ranks on {', '.join(sorted(hosts))}: `--interface NAME` names the network interface on which "
            "they reach this host."
        )
    key = store_key(connection.client.session.key)
    port = connection.agent.call(ServeStore(connection.ip, key.hex())).port
    return f"tcp:{connection.ip}:{port}"


def join_config(
    layout: Layout, settings: Settings, rank: int, seat: Seat, store: str, *, recoverable: bool
) -> JoinConfig:
    """How `rank` joins."""
    return JoinConfig(
        **dataclasses.asdict(seat),
        rank=rank,
        world_size=layout.num_ranks,
        backend=layout.backend,
        store=store,
        timeout_s=collective_timeout(settings, recoverable=recoverable),
        recoverable=recoverable,
        output_limit=settings.output_limit,
    )


def gather(futures: Mapping[int, Future[R]], timeout_s: float, connection: Connection) -> dict[int, R]:
    """The results of one future a rank; ends early when the cluster is gone.

    Raises:
        StartError: a rank failed or ended, the agent is gone, or the time is over.
    """
    end = time.monotonic() + timeout_s
    _wait(futures.values(), lambda: _over(connection, futures) or time.monotonic() > end)
    if not all(future.done() for future in futures.values()):
        _raise_if_ended(connection, futures)
    answers = {}
    for rank, future in futures.items():
        if not future.done():
            raise StartError(f"Rank {rank} did not join: {_why(connection, timeout_s)}.")
        try:
            answers[rank] = future.result()
        except Exception as error:
            raise StartError(f"Rank {rank} could not join: {error}") from None
    return answers


def _over(connection: Connection, ranks: Iterable[int]) -> bool:
    return connection.agent.closed.is_set() or any(rank in connection.agent.exits for rank in ranks)


def _raise_if_ended(connection: Connection, ranks: Iterable[int]) -> None:
    for rank in ranks:
        if event := connection.agent.exits.get(rank):
            raise StartError(f"Rank {rank} has not answered: it {describe_death(event)}.")


def _why(connection: Connection, timeout_s: float) -> str:
    return "the host agent is gone" if connection.agent.closed.is_set() else f"no answer in {timeout_s:.0f} s"


def _left(end: float) -> float:
    return max(1.0, end - time.monotonic())


def _wait(futures: Iterable[Future[Any]], give_up: Callable[[], bool]) -> None:
    for future in futures:
        while not future.done() and not give_up():
            try:
                future.exception(0.05)
            except Exception:  # not done yet; a failure is raised by the caller, who names the rank
                continue
