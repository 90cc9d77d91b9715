"""Replacing dead ranks in place: a forked newcomer takes the rank, the others keep everything they have."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.cluster import remote
from axon_nb.cluster.bringup import gather, join_settings, store_address
from axon_nb.cluster.hosts import seats
from axon_nb.cluster.launcher import fork_request
from axon_nb.cluster.launching import rank_environment
from axon_nb.cluster.recovery import next_epoch
from axon_nb.errors import StartError, UsageError
from axon_nb.records.ranks import format_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster
    from axon_nb.cluster.connection import Connection

__all__ = ["repair"]

_RECOVERY = "axon_nb.engine.groups.recovery"
_BOOTSTRAP = "axon_nb.engine.bootstrap"
_LIMIT_S = 30.0


def repair(cluster: Cluster, ranks: Sequence[int] | None) -> list[int]:
    """Replace ranks, and form the groups of all anew; returns the replaced ones.

    Args:
        cluster: The cluster.
        ranks: Which; None: those that are dead. One that lives is killed first: the user asked for it.

    Raises:
        UsageError: there is nothing to replace, or these ranks cannot be.
        StartError: a newcomer did not come up.
    """
    health = cluster.health
    chosen = sorted(health.dead) if ranks is None else list(ranks)
    if not chosen:
        raise UsageError("Every rank is alive; `--ranks 2` replaces one all the same, and its variables are lost.")
    if cluster.engines != "axon":
        raise UsageError(
            f"Ranks of the launcher {cluster.engines!r} cannot be replaced one by one: `%distributed restart`."
        )
    if len(chosen) == cluster.world_size:
        raise UsageError("No rank would be left to keep anything: `%distributed restart` starts all ranks afresh.")
    connection, settings = cluster.connection, cluster.settings
    _end(cluster, [rank for rank in chosen if rank not in health.dead])
    survivors = [rank for rank in cluster.ranks if rank not in chosen]
    groups = _groups(connection, survivors)
    _fork(connection, cluster, chosen)
    epoch = next_epoch()
    calls: dict[int, Any] = {
        rank: remote.call(connection.client, rank, f"{_RECOVERY}:recover", epoch=epoch, replaced=True)
        for rank in survivors
    }
    seated = seats(cluster.layout, cluster.places)
    store = store_address(connection, {place["host"] for place in cluster.places})
    for rank in chosen:
        arguments = join_settings(cluster.layout, settings, rank, seated[rank], store)
        own = [group for group in groups if rank in group["ranks"]]
        calls[rank] = remote.call(connection.client, rank, f"{_BOOTSTRAP}:join", **arguments, epoch=epoch, groups=own)
    answers = gather(calls, _LIMIT_S, connection)
    for rank in chosen:
        cluster.replaced(rank, answers[rank])
    health.broken = ""
    return chosen


def _end(cluster: Cluster, ranks: Sequence[int]) -> None:
    for rank in ranks:
        cluster.connection.agent.call("signal", rank=rank, signal=int(signal.SIGKILL))
    end = time.monotonic() + _LIMIT_S
    while any(rank not in cluster.health.dead for rank in ranks):
        if time.monotonic() > end:
            raise StartError(f"ranks {format_ranks(ranks)} did not end within {_LIMIT_S:.0f} s of SIGKILL.")
        time.sleep(0.005)


def _groups(connection: Connection, survivors: Sequence[int]) -> list[dict[str, Any]]:
    calls = {rank: remote.call(connection.client, rank, f"{_RECOVERY}:registry") for rank in survivors}
    by_name: dict[str, dict[str, Any]] = {}
    for answer in gather(calls, _LIMIT_S, connection).values():
        by_name.update({group["name"]: group for group in answer})
    return sorted(by_name.values(), key=lambda group: (len(group["name"]), group["name"]))


def _fork(connection: Connection, cluster: Cluster, ranks: Sequence[int]) -> None:
    client = connection.client
    for rank in ranks:
        client.unregister(rank)  # its id is free only when the controller has forgotten it
    if not client.wait_unregistered(ranks, _LIMIT_S):
        raise StartError(f"The controller did not forget ranks {format_ranks(ranks)} within {_LIMIT_S:.0f} s.")
    env = rank_environment(cluster.layout)
    for rank in ranks:
        connection.agent.call("fork", **fork_request(rank, connection.run_dir.engine_file, env, os.getcwd()))
    if not client.wait_registered(ranks, _LIMIT_S):
        raise StartError(
            f"Ranks {format_ranks(ranks)} did not come up within {_LIMIT_S:.0f} s: see {connection.run_dir.path}."
        )
