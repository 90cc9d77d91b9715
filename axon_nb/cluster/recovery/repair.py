"""Recovery after an aborted cell, and repair: rebuild the groups of all ranks, and replace dead ranks in place.

A new process takes over a dead rank, and all other ranks keep their state. On request, the new ranks get the variables
of a surviving rank, straight from rank to rank. Groups that cannot be rebuilt are disabled, and the reason is reported,
as are ranks that an interrupt or a failure left one optimizer step apart.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from axon_nb.cluster import rpc
from axon_nb.cluster.failures import REPAIR_HINT
from axon_nb.cluster.launch.compatibility import can_replace, refusal
from axon_nb.cluster.launch.engines import ANSWER_S, ask, join_config, store_address
from axon_nb.cluster.launch.hosts import start_missing
from axon_nb.cluster.launch.placement import place_ranks
from axon_nb.cluster.recovery import new_ranks
from axon_nb.cluster.rpc import Answer, RankClient
from axon_nb.cluster.state import ClusterState, Health
from axon_nb.errors import AxonError, ClusterLostError, StartError, UsageError
from axon_nb.host.client import AgentClient, outcome
from axon_nb.records.protocol import recovery as protocol
from axon_nb.records.protocol.agent import AgentState, GetInfo, Signal
from axon_nb.records.protocol.cells import AbortReply, AbortRequest
from axon_nb.records.protocol.wire import RankCall
from axon_nb.records.ranks import format_ranks, name_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.launch.connection import Connection
    from axon_nb.cluster.launch.placement import Layout

_ABORT_TIMEOUT_S = 2.0
_AGENT_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 5.0
_AGENT_SILENT = "the host agent does not respond, as if it was stopped or swapped out"
_ATTEMPTS = 3
_ATTEMPT_TIMEOUT_S = 10.0
_SLOW_ATTEMPT_TIMEOUT_S = 60.0
_RESEND_INTERVAL_S = 0.25
_REPORT_EVERY = 500
"""Abandoned groups are reported each time this many more have accumulated on one rank."""
_PATIENCE_S, _PATIENCE_AFTER_INTERRUPT_S = 10.0, 1.0
"""A host agent that does not reply for this long is stopped or swapped out; ranks cannot rendezvous without it."""
_ASK_INTERVAL_S = 0.2
_CELL_PATIENCE_S = 1.0
"""How long a cell waits for the host agent's reply."""


def repair(
    state: ClusterState,
    ranks: Sequence[int] | None,
    *,
    source: int | None = None,
    names: Sequence[str] = (),
    all_allowed: bool = False,
    host: str | None = None,
) -> new_ranks.RepairReport:
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
    raise_if_silent(state)
    layout = state.layout if host is None else _moved(state, targets, host)
    start_missing(state.connection, layout, state.hosts, targets)
    with new_ranks.interrupts_deferred() as interrupted:
        reasons = {rank: state.health.dead.get(rank, "") for rank in targets}
        _kill(state, [rank for rank in targets if rank not in state.health.dead])
        lost = ask(state.connection, dict.fromkeys(survivors, protocol.FindLostShards(tuple(targets))))
        _replace_ranks(state, layout, targets, survivors, interrupted)
        copied = new_ranks.Copied() if source is None else _copy(state, targets, survivors, source, names)
        returned = _return(state, targets) if targets and source is None else None
    largest: dict[str, protocol.LostShards] = {}  # of what the survivors report
    for part in (part for parts in lost.values() for part in parts):
        if part.name not in largest or part.bytes > largest[part.name].bytes:
            largest[part.name] = part
    kept = tuple(largest.values()) if returned is None else ()
    return new_ranks.RepairReport(tuple(targets), tuple(survivors), reasons, source, copied, kept, returned)


def raise_if_silent(state: ClusterState) -> None:
    """Raise StartError if the host agent does not respond."""
    if not state.connection.agent.responds(_AGENT_TIMEOUT_S):
        raise StartError(f"{_AGENT_SILENT[0].upper()}{_AGENT_SILENT[1:]}. Wait for it, or run `%distributed restart`.")


def _return(state: ClusterState, ranks: Sequence[int]) -> new_ranks.Returned | None:
    try:
        return new_ranks.return_to_protected(state.connection, state.ranks)
    except StartError as error:
        raise StartError(
            f"Replaced {name_ranks(ranks)}, but failed to return to the last protected step: run `%distributed repair "
            f"--ranks {format_ranks(ranks)}` to try again. {error}"
        ) from None


def _copy(
    state: ClusterState, ranks: Sequence[int], survivors: Sequence[int], source: int, names: Sequence[str]
) -> new_ranks.Copied:
    try:
        return new_ranks.copy_namespace(state.connection, ranks, survivors, source, names)
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
    return msgspec.structs.replace(layout, hosts=tuple(hosts))


def _replace_ranks(
    state: ClusterState,
    layout: Layout,
    targets: Sequence[int],
    survivors: Sequence[int],
    interrupted: threading.Event,
) -> None:
    groups = new_ranks.list_groups(state.connection, survivors)
    try:
        new_ranks.fork_ranks(state.connection, layout, targets, interrupted)
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
    connection: Connection, targets: Sequence[int], groups: Sequence[protocol.GroupRecord]
) -> list[protocol.GroupRecord]:
    """Add the groups of which no rank survives, as far as protection kept them."""
    by_name = {group.name: group for group in groups}
    for kept in ask(connection, {rank: protocol.ListKeptGroups(rank) for rank in targets}).values():
        by_name |= {group.name: group for group in kept if set(group.ranks) <= set(targets)}
    return sorted(by_name.values(), key=lambda group: (len(group.name), group.name))


def _join(
    state: ClusterState,
    layout: Layout,
    targets: Sequence[int],
    survivors: Sequence[int],
    groups: Sequence[protocol.GroupRecord],
) -> dict[int, Any]:
    connection, infos = state.connection, state.rank_info
    if layout.hosts != state.layout.hosts:
        described = ask(connection, dict.fromkeys(targets, protocol.Describe()))
        infos = tuple(described.get(rank, info) for rank, info in enumerate(infos))
    epoch = state.next_epoch()
    calls: dict[int, RankCall[Any]] = dict.fromkeys(survivors, protocol.RecoverAfterRepair(epoch))
    placements = place_ranks(layout, infos)
    store = store_address(connection, {info.host for info in (*infos, *state.rank_info)})
    for rank in targets:
        config = join_config(layout, state.settings, rank, placements[rank], store, recoverable=True)
        rank_groups = tuple(group for group in groups if rank in group.ranks)
        calls[rank] = protocol.Join(config, epoch, rank_groups)
    try:
        return ask(connection, calls)
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
        rpc.call(client, rank, protocol.DisableGroups(reason))


def _kill(state: ClusterState, ranks: Sequence[int]) -> None:
    state.health.expected_deaths.update(ranks)
    for rank in ranks:
        state.connection.agent.call(Signal(rank, int(signal.SIGKILL)))
    end = time.monotonic() + ANSWER_S
    while any(rank not in state.health.dead for rank in ranks):
        if time.monotonic() > end:
            raise StartError(f"{name_ranks(ranks).capitalize()} did not exit within {ANSWER_S:.0f} s of SIGKILL.")
        time.sleep(0.005)


def describe_diverged_steps(reports: Mapping[int, Sequence[protocol.OptimizerReport]]) -> list[str]:
    """Describe, in a line per optimizer, which ranks made one step more than others in the last cell.

    Nothing is reported if ranks may differ on purpose: other optimizers, other models, other steps before the cell, no
    communication in it, or more than one step between them.

    Args:
        reports: A record per optimizer, by rank. They are numbered in the order of their first steps; an optimizer that
            has made none (-1) is matched by its variable's name.
    """
    numbers = sorted({record.number for report in reports.values() for record in report} - {-1})
    matched = [_match_optimizer(number, reports) for number in numbers]
    lines = [_describe_divergence(optimizers) for optimizers in matched if len(optimizers) == len(reports)]
    return [line for line in lines if line]


def _match_optimizer(
    number: int, reports: Mapping[int, Sequence[protocol.OptimizerReport]]
) -> dict[int, protocol.OptimizerReport]:
    matches = {rank: record for rank, report in reports.items() for record in report if record.number == number}
    names = {record.name for record in matches.values()}
    for rank in reports.keys() - matches.keys():
        unused = (record for record in reports[rank] if record.number == -1)
        matches.update((rank, record) for record in unused if record.name in names)
    return dict(sorted(matches.items()))


def _describe_divergence(optimizers: Mapping[int, protocol.OptimizerReport]) -> str:
    first = next(iter(optimizers.values()))
    is_same = all(entry.shapes == first.shapes and entry.before == first.before for entry in optimizers.values())
    steps = {rank: record.steps for rank, record in optimizers.items()}
    most, least = max(steps.values()), min(steps.values())
    if not is_same or most - least != 1 or not all(record.communicated for record in optimizers.values()):
        return ""
    name = f"`{first.name}`" if first.name else "the optimizer"
    ahead, behind = ([rank for rank in steps if steps[rank] == count] for count in (most, least))
    verb = "is" if len(ahead) == 1 else "are"
    line = f"{name_ranks(ahead).capitalize()} {verb} at step {most} of {name}, {name_ranks(behind)} at {least}."
    reasons = {record.not_replicated for record in optimizers.values() if record.not_replicated}
    if reasons:
        return f"{line} Its model {reasons.pop()}: load a checkpoint on all ranks, or recreate model and optimizer."
    return f"{line} Run `%distributed sync` to copy models and optimizers of rank 0 to all ranks."


class AgentWatch:
    """Asks the host agent again and again whether it is there.

    Args:
        agent: The notebook's connection to it.
    """

    def __init__(self, agent: AgentClient) -> None:
        self._agent = agent
        self._asked_at = 0.0
        self._reply: Future[Any] | None = None
        self._state: AgentState | None = None

    def stopped(self, now: float) -> tuple[frozenset[int], int]:
        """Return the ranks that are stopped (SIGSTOP), and the controller's pid if it is; 0 if not."""
        self.silent_s(now)
        state = self._state
        if state is None:
            return frozenset(), 0
        return frozenset(state.stopped), (state.controller or 0) if state.controller_stopped else 0

    def silent_s(self, now: float) -> float:
        """Return for how many seconds it has owed a reply."""
        if self._reply is None or self._reply.done():
            if self._reply is not None and self._reply.exception() is None:
                self._state = outcome(GetInfo, self._reply.result())
            if now - self._asked_at > _ASK_INTERVAL_S:
                with contextlib.suppress(ClusterLostError):  # the cluster's health reports it
                    self._reply, self._asked_at = self._agent.send(GetInfo()), now
            return 0.0
        return now - self._asked_at


class Recovery:
    """One recovery, stepped by whoever steps the cell; an interrupt ends it only if the host agent does not respond.

    Args:
        client: The cluster's client.
        ranks: All ranks of the world.
        health: Updated if the groups cannot be rebuilt.
        next_epoch: Returns the epoch of an attempt, higher than any before.
        agent: Whether the host agent responds.
        interrupted: Whether the user waits for the end.
        slow_connect: Whether an attempt may take a minute rather than 10 seconds: NCCL's communicators connect slowly.
    """

    def __init__(
        self,
        client: RankClient,
        ranks: Sequence[int],
        health: Health,
        *,
        next_epoch: Callable[[], int],
        agent: AgentWatch,
        interrupted: Callable[[], bool] = lambda: False,
        slow_connect: bool = False,
    ) -> None:
        self._next_epoch = next_epoch
        self._agent = agent
        self._interrupted = interrupted
        self._attempt_timeout_s = _SLOW_ATTEMPT_TIMEOUT_S if slow_connect else _ATTEMPT_TIMEOUT_S
        self._client = client
        self._ranks = list(ranks)
        self._health = health
        self._attempt = 0
        self._futures: dict[int, Future[protocol.RecoveryReport]] = {}
        self._aborts: list[Answer[AbortReply]] = []
        self._started_at = 0.0
        self._aborted_at = 0.0

    def step(self) -> bool:
        """Do what is due; return True once the recovery is done, whether it worked or not."""
        if self._health.disconnect_reason:
            return True
        health = self._health
        missing = [rank for rank in self._ranks if rank in {*health.dead, *health.stuck, *health.lost_contexts}]
        if missing:
            remaining = [rank for rank in self._ranks if rank not in missing or rank in health.lost_contexts]
            return self._disable_groups(self._describe_missing(missing), remaining, until_back=True)
        now = time.monotonic()
        if self._agent.silent_s(now) > (_PATIENCE_AFTER_INTERRUPT_S if self._interrupted() else _PATIENCE_S):
            self._abort_attempt(now)
            print(f"The process groups were not rebuilt: {_AGENT_SILENT}.", file=sys.stderr)
            reason = f"{_AGENT_SILENT}; they are rebuilt with the next cell after it does"
            return self._disable_groups(reason, self._ranks, until_back=True)
        if not self._futures:
            return self._start_attempt(now)
        failed = [rank for rank, future in self._futures.items() if future.done() and future.exception() is not None]
        if all(future.done() for future in self._futures.values()):
            if not all(future.done() for future in self._aborts):
                return False  # a late one would break the rebuilt groups
            if not failed:
                reports = {rank: future.result() for rank, future in self._futures.items()}
                if lost := {rank: one.rebuilt.lost_device for rank, one in reports.items() if one.rebuilt.lost_device}:
                    print("\n".join(lost.values()), file=sys.stderr)
                    self._health.lost_contexts.update(lost)
                    return False
                self._health.groups_disabled = ""
                self._report_abandoned([report.rebuilt.abandoned for report in reports.values()])
                for line in dict.fromkeys(line for report in reports.values() for line in report.rebuilt.not_reset):
                    print(line, file=sys.stderr)
                for line in describe_diverged_steps({rank: report.steps for rank, report in reports.items()}):
                    print(line)
                return True
            self._futures = {}
            return False
        if failed or now - self._started_at > self._attempt_timeout_s:
            self._abort_attempt(now)
        return False

    def _report_abandoned(self, counts: Sequence[int]) -> None:
        # An aborted Gloo group cannot be freed: each keeps 2 threads and about 0.14 MiB until the rank exits.
        if max(counts) // _REPORT_EVERY > self._health.leaks_reported:
            self._health.leaks_reported = max(counts) // _REPORT_EVERY
            print(
                f"{max(counts)} abandoned process groups still hold threads on the ranks. Run `%distributed restart` "
                "when convenient to free them."
            )

    def _start_attempt(self, now: float) -> bool:
        if self._attempt == _ATTEMPTS:
            reason = "the process groups could not be rebuilt"
            print(f"{reason.capitalize()}. Run `%distributed repair` to try again.", file=sys.stderr)
            return self._disable_groups(f"{reason}; run `%distributed repair` to try again", self._ranks)
        self._attempt += 1
        self._started_at = now
        epoch = self._next_epoch()
        self._futures = {r: rpc.call(self._client, r, protocol.Recover(epoch)) for r in self._ranks}
        return False

    def _abort_attempt(self, now: float) -> None:
        # Some ranks wait for one that failed: the next attempt starts when all are idle.
        if now - self._aborted_at > _RESEND_INTERVAL_S:
            self._aborted_at = now
            for rank, future in self._futures.items():
                if not future.done():
                    self._aborts.append(self._client.request(rank, AbortRequest(again=True)))

    def _describe_missing(self, missing: Sequence[int]) -> str:
        health, left, parts = self._health, list(missing), []
        for known, state in (
            (health.dead, "dead"),
            (health.stuck, "stuck in an earlier cell"),
            (health.lost_contexts, "without a CUDA context"),
        ):
            ranks = [rank for rank in left if rank in known]
            left = [rank for rank in left if rank not in known]
            parts += [f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {state}"] if ranks else []
        # Without --ranks, `repair` leaves stuck ranks alone: they may come back.
        option = f" --ranks {format_ranks(missing)}" if health.stuck.intersection(missing) else ""
        pronoun = "it" if len(missing) == 1 else "them"
        repair = f"run `%distributed repair{option}` to replace {pronoun}"
        return f"{' and '.join(parts)}; {repair if health.remedy == REPAIR_HINT else 'run `%distributed restart`'}"

    def _disable_groups(self, reason: str, ranks: Sequence[int], *, until_back: bool = False) -> bool:
        self._health.groups_disabled, self._health.rebuild_when_back = reason, until_back
        for rank in ranks:
            rpc.call(self._client, rank, protocol.DisableGroups(reason))
        return True


def auto_repair(state: ClusterState) -> None:
    """Replace the dead ranks, if there are any and they can be replaced, and print the report."""
    dead = state.health.dead
    unusable = {*dead, *state.health.lost_contexts}
    possible = state.engines == "axon" and len(unusable) < state.world_size and not state.health.disconnect_reason
    possible = possible and can_replace(state.rank_info, state.backend)
    if dead and possible and not state.busy and not state.health.stuck:
        print("\n".join(repair(state, None).lines(why=True)))


def rebuild_if_back(state: ClusterState) -> None:
    """Rebuild the groups that were disabled because ranks or the agent did not respond, if they do now; print it."""
    health = state.health
    missing = {*health.dead, *health.stuck, *health.lost_contexts}
    is_due = bool(health.groups_disabled) and health.rebuild_when_back and not missing
    if not is_due or health.disconnect_reason or state.busy:
        return
    try:
        if state.connection.agent.responds(_CELL_PATIENCE_S):
            print("\n".join(repair(state, None).lines()))
    except AxonError as error:
        health.rebuild_when_back = False
        print(f"Failed to rebuild the process groups: {error}")


def replace_stuck(state: ClusterState, ranks: Sequence[int]) -> list[str]:
    """Replace ranks that do not react, all of them if need be; return the lines to show, also if it fails."""
    if not ranks or state.health.disconnect_reason:
        return []
    try:
        if not state.connection.agent.responds(_CELL_PATIENCE_S):
            return [f"{name_ranks(ranks).capitalize()} cannot be replaced: {_AGENT_SILENT}."]
        return repair(state, ranks, all_allowed=True).lines()
    except AxonError as error:
        return [f"Failed to replace {name_ranks(ranks)}: {error}"]
