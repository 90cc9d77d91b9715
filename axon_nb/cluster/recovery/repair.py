"""Replacing dead ranks in place: a forked newcomer takes the rank, the others keep everything they have.

Variables of a living rank for those that were just replaced, straight from rank to rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from axon_nb.cluster.launch.compatibility import can_replace, refusal
from axon_nb.cluster.launch.engines import rank_environment
from axon_nb.cluster.launch.join import await_reached, gather, join_config, store_address
from axon_nb.cluster.launch.launchers import fork_request
from axon_nb.cluster.launch.placement import seats
from axon_nb.cluster.recovery.recovery import next_epoch
from axon_nb.cluster.recovery.report import Copied, RepairReport
from axon_nb.cluster.rpc import requests
from axon_nb.errors import AxonError, StartError, UsageError
from axon_nb.records.protocol.agent import Signal
from axon_nb.records.protocol.cells import AbortRequest
from axon_nb.records.protocol.joining import Join
from axon_nb.records.protocol.messages import RankCall
from axon_nb.records.protocol.recovery import FindHeldAlone, GroupRecord, ListGroups, RecoverAfterRepair, StandDown
from axon_nb.records.protocol.transfer import ListGroupVariables, PackNamespace, ReceiveNamespace, SendNamespace
from axon_nb.records.ranks import format_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.launch.connection import Connection
    from axon_nb.cluster.state import ClusterState

__all__ = ["auto_repair", "copy_variables", "repair", "replace_stuck"]

R = TypeVar("R")

_COPY_LIMIT_S = 60.0
_SLOWEST_BYTES_S = 20e6


def copy_variables(
    state: ClusterState, ranks: Sequence[int], survivors: Sequence[int], source: int, names: Sequence[str]
) -> Copied:
    """Copy variables of `source` to `ranks`; process groups are each rank's own of the same name.

    Raises:
        StartError: they were replaced, and could not take the variables over.
    """
    connection = state.connection
    client = connection.client
    try:
        asked = {rank: requests.call(client, rank, ListGroupVariables()) for rank in survivors}
        groups: dict[str, str] = {}
        for answer in gather(asked, _COPY_LIMIT_S, connection).values():
            groups |= {name: group for name, group in answer.items() if not names or name in names}
        packed = requests.call(client, source, PackNamespace(tuple(names)))
        parcel = gather({source: packed}, _COPY_LIMIT_S * 10, connection)[source]
        receive = ReceiveNamespace(source, parcel.size, parcel.digest, parcel.surroundings, groups)
        calls = {rank: requests.call(client, rank, receive) for rank in ranks}
        calls[source] = requests.call(client, source, SendNamespace(tuple(ranks)))
        gather(calls, _COPY_LIMIT_S + parcel.size * len(ranks) / _SLOWEST_BYTES_S, connection)
    except StartError as error:
        raise StartError(
            f"Ranks {format_ranks(ranks)} are replaced, but could not take over the variables of rank {source}, and "
            f"are empty: {error}"
        ) from None
    skipped = {name: why for name, why in parcel.skipped.items() if name not in groups}
    return Copied(tuple(sorted({*parcel.copied, *groups})), skipped, parcel.size)


_REPAIR_S = 30.0
_ABORTED_S = 2.0


def repair(
    state: ClusterState,
    ranks: Sequence[int] | None,
    *,
    source: int | None = None,
    names: Sequence[str] = (),
    all_allowed: bool = False,
) -> RepairReport:
    """Replace ranks, and form the groups of all anew.

    Args:
        state: The cluster.
        ranks: Which, besides those that are dead; one that lives is killed first: the user asked for it.
        source: The rank whose variables the replaced ranks get; None: they start empty.
        names: Which variables; empty: all that can be copied.
        all_allowed: Whether these may be all ranks, of which none keeps anything.

    Raises:
        UsageError: there is nothing to replace, these ranks cannot be, or the source cannot give.
        StartError: a newcomer did not come up.
    """
    chosen = sorted({*state.health.dead, *(ranks or ())})
    _refuse(state, chosen, source, names, all_allowed)
    survivors = [rank for rank in state.ranks if rank not in chosen]
    with _uninterrupted():
        reasons = {rank: state.health.dead.get(rank, "") for rank in chosen}
        _end(state, [rank for rank in chosen if rank not in state.health.dead])
        lost = _ask(state.connection, survivors, FindHeldAlone(tuple(chosen)))
        _replace(state, chosen, survivors)
        copied = None if source is None else copy_variables(state, chosen, survivors, source, names)
    return RepairReport.of(chosen, survivors, reasons=reasons, source=source, copied=copied, lost=lost)


def auto_repair(state: ClusterState) -> None:
    """Replace the ranks that are dead, if there are any and they can be, and say so in one line."""
    dead = state.health.dead
    possible = state.engines == "axon" and len(dead) < state.world_size and not state.health.gone
    possible = possible and can_replace(state.places, state.backend)
    if dead and possible and not state.busy and not state.health.stuck:
        print("\n".join(repair(state, None).lines(why=True)))


def replace_stuck(state: ClusterState, ranks: Sequence[int]) -> list[str]:
    """Replace ranks that do not react, all of them if need be; what to tell the user, also when it cannot be done."""
    if not ranks or state.health.gone:
        return []
    try:
        return repair(state, ranks, all_allowed=True).lines()
    except AxonError as error:
        return [f"They could not be replaced: {error}"]


def _refuse(
    state: ClusterState, chosen: Sequence[int], source: int | None, names: Sequence[str], all_allowed: bool
) -> None:
    if not chosen:
        raise UsageError("Every rank is alive; `--ranks 2` replaces one all the same, and its variables are lost.")
    if reason := refusal(state.places, state.backend):
        raise UsageError(reason)
    if state.engines != "axon":
        raise UsageError(
            f"Ranks of the launcher {state.engines!r} cannot be replaced one by one: `%distributed restart`."
        )
    if len(chosen) == state.world_size and not all_allowed:
        raise UsageError("No rank would be left to keep anything: `%distributed restart` starts all ranks afresh.")
    if names and source is None:
        raise UsageError(f"Names are copied from a rank: `--from 0 {' '.join(names)}`.")
    if source is not None and source not in state.ranks:
        raise UsageError(f"--from {source}: ranks are 0 to {state.world_size - 1}.")
    if source is not None and (source in chosen or source in state.health.dead):
        raise UsageError(f"--from {source}: that rank is replaced itself; variables come from one that lives on.")
    stuck = sorted(state.health.stuck - set(chosen))
    if stuck:
        both = format_ranks(sorted({*stuck, *chosen}))
        raise UsageError(
            f"Rank {format_ranks(stuck)} is stuck in an earlier cell and cannot join the groups anew: "
            f"`%distributed repair --ranks {both}` replaces it too."
        )
    busy = [rank for rank in state.busy if rank not in chosen]
    if busy:
        raise UsageError(f"Ranks {format_ranks(busy)} still run a cell: wait for its end or interrupt it, then repair.")


def _replace(state: ClusterState, chosen: Sequence[int], survivors: Sequence[int]) -> None:
    connection = state.connection
    groups = _groups(connection, survivors)
    _fork(connection, state, chosen)
    epoch = next_epoch()
    calls: dict[int, Any] = {
        rank: requests.call(connection.client, rank, RecoverAfterRepair(epoch)) for rank in survivors
    }
    seated = seats(state.layout, state.places)
    store = store_address(connection, {place.host for place in state.places})
    for rank in chosen:
        config = join_config(state.layout, state.settings, rank, seated[rank], store, recoverable=True)
        own = tuple(group for group in groups if rank in group.ranks)
        calls[rank] = requests.call(connection.client, rank, Join(config, epoch, own))
    try:
        answers = gather(calls, _REPAIR_S, connection)
    except AxonError:
        _leave(connection, chosen, survivors)
        raise
    for rank in chosen:
        state.replaced(rank, answers[rank])
    state.health.broken = ""


def _leave(connection: Connection, chosen: Sequence[int], survivors: Sequence[int]) -> None:
    """A newcomer has failed: the others need not wait for it until their limit."""
    client = connection.client
    ended = [client.request(rank, AbortRequest(again=True)) for rank in survivors]
    end = time.monotonic() + _ABORTED_S
    for answer in ended:
        answer.wait(max(0.0, end - time.monotonic()))
    reason = f"rank {format_ranks(chosen)} could not be replaced; `%distributed repair` tries again"
    for rank in survivors:
        requests.call(client, rank, StandDown(reason))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A repair that is given up half-way leaves ranks that wait for one that never joins."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _end(state: ClusterState, ranks: Sequence[int]) -> None:
    state.health.awaited.update(ranks)
    for rank in ranks:
        state.connection.agent.call(Signal(rank, int(signal.SIGKILL)))
    end = time.monotonic() + _REPAIR_S
    while any(rank not in state.health.dead for rank in ranks):
        if time.monotonic() > end:
            raise StartError(f"ranks {format_ranks(ranks)} did not end within {_REPAIR_S:.0f} s of SIGKILL.")
        time.sleep(0.005)


def _ask(connection: Connection, asked: Sequence[int], call: RankCall[R]) -> dict[int, R]:
    calls = {rank: requests.call(connection.client, rank, call) for rank in asked}
    return gather(calls, _REPAIR_S, connection)


def _groups(connection: Connection, survivors: Sequence[int]) -> list[GroupRecord]:
    by_name: dict[str, GroupRecord] = {}
    for answer in _ask(connection, survivors, ListGroups()).values():
        by_name.update({group.name: group for group in answer})
    return sorted(by_name.values(), key=lambda group: (len(group.name), group.name))


def _fork(connection: Connection, state: ClusterState, ranks: Sequence[int]) -> None:
    client = connection.client
    for rank in ranks:
        client.unregister(rank)  # its id is free only when the controller has forgotten it
    if not client.wait_unregistered(ranks, _REPAIR_S):
        raise StartError(f"The controller did not forget ranks {format_ranks(ranks)} within {_REPAIR_S:.0f} s.")
    env = rank_environment(state.layout)
    for rank in ranks:
        connection.agent.call(fork_request(rank, connection.run_dir.engine_file, env, os.getcwd()))
    if not client.wait_registered(ranks, _REPAIR_S):
        raise StartError(
            f"Ranks {format_ranks(ranks)} did not come up within {_REPAIR_S:.0f} s: see {connection.run_dir.path}."
        )
    await_reached(connection, ranks, _REPAIR_S)
