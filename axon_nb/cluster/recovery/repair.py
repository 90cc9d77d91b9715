"""Replace dead ranks in place: a new process takes over the rank, and all other ranks keep their state.

On request, the new ranks get the variables of a surviving rank, straight from rank to rank.
"""

from __future__ import annotations

import dataclasses
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.launch.compatibility import refusal
from axon_nb.cluster.launch.host_agents import start_missing
from axon_nb.cluster.launch.join import gather, join_config, store_address
from axon_nb.cluster.launch.placement import place_ranks
from axon_nb.cluster.recovery.new_ranks import call_all, copy_namespace, fork_ranks, interrupts_deferred, list_groups
from axon_nb.cluster.recovery.protection import return_to_protected
from axon_nb.cluster.recovery.recovery import AGENT_SILENT
from axon_nb.cluster.recovery.report import Copied, RepairReport, Returned
from axon_nb.cluster.rpc import requests
from axon_nb.errors import AxonError, StartError, UsageError
from axon_nb.records.protocol.aborts import AbortRequest
from axon_nb.records.protocol.agent import GetInfo, Signal
from axon_nb.records.protocol.joining import Describe, Join
from axon_nb.records.protocol.recovery import (
    DisableGroups,
    FindLostShards,
    GroupRecord,
    ListKeptGroups,
    RecoverAfterRepair,
)
from axon_nb.records.ranks import format_ranks, name_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.launch.connection import Connection
    from axon_nb.cluster.launch.placement import Layout
    from axon_nb.cluster.state import ClusterState

_REPAIR_TIMEOUT_S = 30.0
_ABORT_TIMEOUT_S = 2.0
_AGENT_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 5.0


def repair(
    state: ClusterState,
    ranks: Sequence[int] | None,
    *,
    source: int | None = None,
    names: Sequence[str] = (),
    all_allowed: bool = False,
    host: str | None = None,
) -> RepairReport:
    """Replace ranks and rebuild all process groups; if every rank is alive and the groups are disabled, only rebuild.

    Args:
        state: The cluster.
        ranks: Which, besides those that are dead or lost their CUDA context. A live one is killed first, as the user
            asked for it.
        source: The rank whose variables the replaced ranks get; None: they start empty.
        names: Which variables; empty: all that can be copied.
        all_allowed: Whether these may be all ranks, so that none keeps its state; always, if all are dead.
        host: The host on which the new ranks start; None: where the old ones ran.

    Raises:
        UsageError: there is nothing to replace, these ranks cannot be replaced, or the source cannot be copied from.
        StartError: a new rank failed to start.
    """
    targets = sorted({*state.health.dead, *state.health.lost_contexts, *(ranks or ())})
    _check_request(state, targets, source, names, all_allowed)
    survivors = [rank for rank in state.ranks if rank not in targets]
    if not state.connection.agent.responds(_AGENT_TIMEOUT_S):
        raise StartError(f"{AGENT_SILENT[0].upper()}{AGENT_SILENT[1:]}. Wait for it, or run `%distributed restart`.")
    layout = state.layout if host is None else _moved(state, targets, host)
    start_missing(state.connection, layout, state.hosts, targets)
    with interrupts_deferred() as interrupted:
        reasons = {rank: state.health.dead.get(rank, "") for rank in targets}
        _kill(state, [rank for rank in targets if rank not in state.health.dead])
        lost = call_all(state.connection, survivors, FindLostShards(tuple(targets)))
        _replace_ranks(state, layout, targets, survivors, interrupted)
        copied = None if source is None else _copy(state, targets, survivors, source, names)
        returned = _return(state, targets) if targets and source is None else None
    return RepairReport.of(
        targets, survivors, reasons=reasons, source=source, copied=copied, lost=lost, returned=returned
    )


def _return(state: ClusterState, ranks: Sequence[int]) -> Returned | None:
    try:
        return return_to_protected(state.connection, state.ranks)
    except StartError as error:
        raise StartError(
            f"Replaced {name_ranks(ranks)}, but failed to return to the last protected step: run `%distributed repair "
            f"--ranks {format_ranks(ranks)}` to try again. {error}"
        ) from None


def _copy(
    state: ClusterState, ranks: Sequence[int], survivors: Sequence[int], source: int, names: Sequence[str]
) -> Copied:
    try:
        return copy_namespace(state.connection, ranks, survivors, source, names)
    except StartError as error:
        raise StartError(
            f"Replaced {name_ranks(ranks)}, but failed to copy the variables of rank {source}: the new "
            f"{'rank is' if len(ranks) == 1 else 'ranks are'} empty. {error}"
        ) from None


def _check_request(
    state: ClusterState, targets: Sequence[int], source: int | None, names: Sequence[str], all_allowed: bool
) -> None:
    if not targets and (source is not None or not (state.health.groups_disabled or state.health.stuck)):
        raise UsageError(
            "All ranks are alive. Use `--ranks 2` to replace one anyway; "
            "without `config protect=on` it loses its variables."
        )
    if reason := refusal(state.rank_info, state.backend):
        raise UsageError(reason)
    if targets and state.engines != "axon":
        raise UsageError(
            f"Ranks of the launcher {state.engines!r} cannot be replaced one by one: use `%distributed restart`."
        )
    if len(targets) == state.world_size and not all_allowed and set(targets) != set(state.health.dead):
        raise UsageError("That would replace every rank: use `%distributed restart`.")
    if names and source is None:
        raise UsageError(f"Names need a rank to copy from: use `--from 0 {' '.join(names)}`.")
    if source is not None and source not in state.ranks:
        raise UsageError(f"--from must be a rank from 0 to {state.world_size - 1}; got {source}.")
    if source is not None and (source in targets or source in state.health.dead):
        raise UsageError(f"--from {source}: rank {source} is being replaced; choose a surviving rank.")
    stuck = sorted(state.health.stuck - set(targets))
    if stuck:
        both, one, too = format_ranks({*stuck, *targets}), len(stuck) == 1, " too" if targets else ""
        raise UsageError(
            f"{name_ranks(stuck).capitalize()} {'is' if one else 'are'} stuck in an earlier cell and cannot rejoin: "
            f"run `%distributed repair --ranks {both}` to replace {'it' if one else 'them'}{too}."
        )
    busy = [rank for rank in state.busy if rank not in targets]
    if busy:
        are = "is" if len(busy) == 1 else "are"
        raise UsageError(
            f"{name_ranks(busy).capitalize()} {are} still running a cell: wait for it or interrupt it, then repair."
        )


def _moved(state: ClusterState, ranks: Sequence[int], host: str) -> Layout:
    """Return the layout with these ranks on another host."""
    layout, here = state.layout, socket.gethostname()
    if not ranks:
        raise UsageError("All ranks are alive. Use `--ranks` to name those that `--on` replaces.")
    others = {*state.connection.agent.call(GetInfo()).hosts, *filter(None, layout.hosts)}
    if host not in {here, *others}:
        raise UsageError(f"--on must be a host of the cluster ({', '.join([here, *sorted(others)])}); got {host}.")
    hosts = list(layout.hosts or ("",) * layout.num_ranks)
    for rank in ranks:
        hosts[rank] = "" if host == here else host
    return dataclasses.replace(layout, hosts=tuple(hosts))


def _replace_ranks(
    state: ClusterState,
    layout: Layout,
    targets: Sequence[int],
    survivors: Sequence[int],
    interrupted: threading.Event,
) -> None:
    groups = list_groups(state.connection, survivors)
    try:
        fork_ranks(state.connection, layout, targets, interrupted)
        infos = _join(state, layout, targets, survivors, _with_kept_groups(state.connection, targets, groups))
    except StartError as error:
        # The next repair would take the exit of one that is left for that of its successor.
        state.connection.agent.kill_ranks(targets, _KILL_TIMEOUT_S)
        raise StartError(f"{error} Run `%distributed repair` to try again.") from None
    if lost := {rank: infos[rank].lost_device for rank in survivors if infos[rank].lost_device}:
        state.health.lost_contexts.update(lost)
        raise StartError(f"The process groups were not rebuilt. {' '.join(lost.values())}")
    for rank in targets:
        state.mark_replaced(rank, infos[rank], layout)
    state.health.groups_disabled = ""


def _with_kept_groups(
    connection: Connection, targets: Sequence[int], groups: Sequence[GroupRecord]
) -> list[GroupRecord]:
    """Add the groups of which no rank survives, as far as protection kept them."""
    calls = {rank: requests.call(connection.client, rank, ListKeptGroups(rank)) for rank in targets}
    by_name = {group.name: group for group in groups}
    for kept in gather(calls, _REPAIR_TIMEOUT_S, connection).values():
        by_name |= {group.name: group for group in kept if set(group.ranks) <= set(targets)}
    return sorted(by_name.values(), key=lambda group: (len(group.name), group.name))


def _join(
    state: ClusterState,
    layout: Layout,
    targets: Sequence[int],
    survivors: Sequence[int],
    groups: Sequence[GroupRecord],
) -> dict[int, Any]:
    connection, infos = state.connection, state.rank_info
    if layout.hosts != state.layout.hosts:
        described = call_all(connection, targets, Describe())
        infos = tuple(described.get(rank, info) for rank, info in enumerate(infos))
    epoch = state.next_epoch()
    calls: dict[int, Any] = {
        rank: requests.call(connection.client, rank, RecoverAfterRepair(epoch)) for rank in survivors
    }
    placements = place_ranks(layout, infos)
    store = store_address(connection, {info.host for info in (*infos, *state.rank_info)})
    for rank in targets:
        config = join_config(layout, state.settings, rank, placements[rank], store, recoverable=True)
        rank_groups = tuple(group for group in groups if rank in group.ranks)
        calls[rank] = requests.call(connection.client, rank, Join(config, epoch, rank_groups))
    try:
        return gather(calls, _REPAIR_TIMEOUT_S, connection)
    except AxonError:
        _release_survivors(connection, targets, survivors)
        raise


def _release_survivors(connection: Connection, targets: Sequence[int], survivors: Sequence[int]) -> None:
    """Release the survivors from waiting, until their timeout, for a new rank that failed."""
    client = connection.client
    aborts = [client.request(rank, AbortRequest(again=True)) for rank in survivors]
    end = time.monotonic() + _ABORT_TIMEOUT_S
    for answer in aborts:
        answer.wait(max(0.0, end - time.monotonic()))
    what = f"{name_ranks(targets)} could not be replaced" if targets else "the process groups could not be rebuilt"
    reason = f"{what}; run `%distributed repair` to try again"
    for rank in survivors:
        requests.call(client, rank, DisableGroups(reason))


def _kill(state: ClusterState, ranks: Sequence[int]) -> None:
    state.health.expected_deaths.update(ranks)
    for rank in ranks:
        state.connection.agent.call(Signal(rank, int(signal.SIGKILL)))
    end = time.monotonic() + _REPAIR_TIMEOUT_S
    while any(rank not in state.health.dead for rank in ranks):
        if time.monotonic() > end:
            raise StartError(
                f"{name_ranks(ranks).capitalize()} did not exit within {_REPAIR_TIMEOUT_S:.0f} s of SIGKILL."
            )
        time.sleep(0.005)
