"""New ranks of a running cluster: fork them, give them the variables of another rank, ask all ranks at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from axon_nb.cluster.launch.join import await_handshake, gather, raise_if_exited
from axon_nb.cluster.launch.launchers import fork_request, rank_hosts
from axon_nb.cluster.launch.placement import rank_environment
from axon_nb.cluster.recovery.report import Copied
from axon_nb.cluster.rpc import requests
from axon_nb.errors import StartError
from axon_nb.records.protocol.agent import GetInfo
from axon_nb.records.protocol.messages import RankCall
from axon_nb.records.protocol.recovery import GroupRecord, ListGroups
from axon_nb.records.protocol.transfer import ListGroupVariables, PackNamespace, ReceiveNamespace, SendNamespace
from axon_nb.records.ranks import name_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.launch.connection import Connection
    from axon_nb.cluster.launch.placement import Layout

R = TypeVar("R")

_TIMEOUT_S = 30.0
_POLL_S = 0.05
_COPY_TIMEOUT_S = 60.0
_MIN_BYTES_PER_S = 20e6


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[threading.Event]:
    """Record interrupts: a repair or resize that stops anywhere leaves ranks that wait for one that never joins.

    Yields:
        Set by an interrupt. The caller looks at it where it can stop.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    previous = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


def call_all(connection: Connection, ranks: Sequence[int], call: RankCall[R]) -> dict[int, R]:
    """Make the same call on each of these ranks and return their replies."""
    calls = {rank: requests.call(connection.client, rank, call) for rank in ranks}
    return gather(calls, _TIMEOUT_S, connection)


def list_groups(connection: Connection, survivors: Sequence[int]) -> list[GroupRecord]:
    """Return the groups of all these ranks besides the default one, in the order of their creation."""
    by_name: dict[str, GroupRecord] = {}
    for groups in call_all(connection, survivors, ListGroups()).values():
        by_name.update({group.name: group for group in groups})
    return sorted(by_name.values(), key=lambda group: (len(group.name), group.name))


def copy_namespace(
    connection: Connection, ranks: Sequence[int], survivors: Sequence[int], source: int, names: Sequence[str]
) -> Copied:
    """Copy variables of `source` to `ranks`; a process group becomes the rank's own group of the same name.

    Args:
        connection: The cluster's connection.
        ranks: The new ranks.
        survivors: The other ranks.
        source: The rank to copy from.
        names: Which variables; empty: all that can be copied.

    Raises:
        StartError: a rank exited, failed or did not reply in time.
    """
    client = connection.client
    futures = {rank: requests.call(client, rank, ListGroupVariables()) for rank in survivors}
    groups: dict[str, str] = {}
    for own_groups in gather(futures, _COPY_TIMEOUT_S, connection).values():
        groups |= {name: group for name, group in own_groups.items() if not names or name in names}
    future = requests.call(client, source, PackNamespace(tuple(names)))
    packed = gather({source: future}, _COPY_TIMEOUT_S * 10, connection)[source]
    receive = ReceiveNamespace(source, packed.size, packed.digest, groups)
    calls = {rank: requests.call(client, rank, receive) for rank in ranks}
    calls[source] = requests.call(client, source, SendNamespace(tuple(ranks)))
    gather(calls, _COPY_TIMEOUT_S + packed.size * len(ranks) / _MIN_BYTES_PER_S, connection)
    skipped = {name: why for name, why in packed.skipped.items() if name not in groups}
    return Copied(tuple(sorted({*packed.copied, *groups})), skipped, packed.size)


def choose_hosts(connection: Connection, layout: Layout, size: int) -> tuple[str, ...]:
    """Return the host of each rank for another number of ranks, empty if all are on the notebook's.

    A new rank goes where the fewest are, also to a host that has joined since.
    """
    if not layout.hosts:
        return ()
    joined = connection.agent.call(GetInfo()).hosts
    usable = [name for name in dict.fromkeys([*layout.hosts, *joined]) if not name or name in joined] or layout.hosts
    hosts = list(layout.hosts[:size])
    while len(hosts) < size:
        hosts.append(min(usable, key=hosts.count))
    return tuple(hosts)


def fork_ranks(connection: Connection, layout: Layout, ranks: Sequence[int], interrupted: threading.Event) -> None:
    """Fork these ranks and wait until they can be called.

    Raises:
        StartError: one exited or did not start in time, or the user interrupted.
    """
    client = connection.client
    for rank in ranks:
        client.unregister(rank)  # its id is free only once the controller has forgotten it
    if not client.wait_unregistered(ranks, _TIMEOUT_S):
        raise StartError(f"The controller did not unregister {name_ranks(ranks)} within {_TIMEOUT_S:.0f} s.")
    hosts = rank_hosts(connection.agent, layout)
    for rank in ranks:
        env, file = rank_environment(layout, rank), connection.run_dir.engine_file
        connection.agent.call(fork_request(rank, file, env, os.getcwd(), host=hosts[rank]))
    end = time.monotonic() + _TIMEOUT_S
    while not client.wait_registered(ranks, _POLL_S):
        raise_if_exited(connection, ranks)
        if interrupted.is_set():
            raise StartError(f"Interrupted before {name_ranks(ranks)} started.")
        if time.monotonic() > end:
            raise StartError(
                f"{name_ranks(ranks).capitalize()} did not start within {_TIMEOUT_S:.0f} s; the logs are in "
                f"{connection.run_dir.path}."
            )
    await_handshake(connection, ranks, _TIMEOUT_S)
