"""Recovery after an aborted cell, and repair: rebuild the groups of all ranks, and replace dead ranks in place.

A new process takes over a dead rank, and all other ranks keep their state. On request, the new ranks get the variables
of a surviving rank, straight from rank to rank. Groups that cannot be rebuilt are disabled, and the reason is reported,
as are ranks that an interrupt or a failure left one optimizer step apart.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from axon_nb.cluster import rpc
from axon_nb.cluster.launch.compatibility import can_replace, refusal
from axon_nb.cluster.launch.engines import ANSWER_S, ask, gather, join_config, store_address
from axon_nb.cluster.launch.hosts import start_missing
from axon_nb.cluster.launch.placement import place_ranks
from axon_nb.cluster.ranks import transitions
from axon_nb.cluster.ranks.transitions import AGENT_SILENT, ContextsLost, Disabled, Step
from axon_nb.cluster.recovery import new_ranks
from axon_nb.cluster.rpc import Answer
from axon_nb.cluster.state import ClusterState
from axon_nb.errors import AxonError, ClusterLostError, StartError, UsageError
from axon_nb.host.client import AgentClient, outcome
from axon_nb.records.protocol import recovery as protocol
from axon_nb.records.protocol.agent import AgentState, GetInfo, Signal
from axon_nb.records.protocol.cells import AbortReply, AbortRequest
from axon_nb.records.protocol.wire import RankCall
from axon_nb.records.ranks import format_ranks, name_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.launch.placement import Layout

_AGENT_TIMEOUT_S = 10.0
_ATTEMPT_TIMEOUT_S = 10.0
_SLOW_ATTEMPT_TIMEOUT_S = 60.0
"""NCCL's communicators connect slowly."""
_REPORT_EVERY = 500
"""Abandoned groups are reported each time this many more have accumulated on one rank."""
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
    targets = sorted({*state.health.dead, *state.health.world.lost_contexts, *(ranks or ())})
    _check_request(state, targets, source, names, all_allowed)
    raise_if_silent(state)
    layout = state.layout if host is None else _moved(state, targets, host)
    start_missing(state.connection, layout, state.hosts, targets)
    work = _Repair(state, layout, targets, source=source, names=names)
    work.carry_out(transitions.Repair(tuple(targets), source))
    largest: dict[str, protocol.LostShards] = {}  # of what the survivors report
    for part in (part for parts in work.lost.values() for part in parts):
        if part.name not in largest or part.bytes > largest[part.name].bytes:
            largest[part.name] = part
    kept = tuple(largest.values()) if work.returned is None else ()
    return new_ranks.RepairReport(
        tuple(targets), tuple(work.survivors), work.reasons, source, work.copied, kept, work.returned
    )


class _Repair(new_ranks.Work):
    """Performs the steps of one repair."""

    closed_before = True

    def __init__(
        self,
        state: ClusterState,
        layout: Layout,
        targets: Sequence[int],
        *,
        source: int | None,
        names: Sequence[str],
    ) -> None:
        super().__init__(state, layout, targets)
        self.survivors = [rank for rank in state.ranks if rank not in targets]
        self._source, self._names = source, names
        dead = state.health.dead
        self.reasons = {rank: dead.get(rank, "") for rank in targets}
        self.lost: dict[int, Sequence[protocol.LostShards]] = {}
        self.returned: new_ranks.Returned | None = None
        self._groups: list[protocol.GroupRecord] = []

    def steps(self) -> dict[Step, Callable[[], object]]:
        own = {Step.KILL: self._kill, Step.SURVEY: self._survey, Step.FORM: self._form}
        return super().steps() | own | {Step.COPY: self._copy, Step.RETURN: self._return}

    def _kill(self) -> None:
        health = self.state.health
        alive = [rank for rank in self.new if rank not in health.dead]
        for rank in alive:
            self.connection.agent.call(Signal(rank, int(signal.SIGKILL)))
        end = time.monotonic() + ANSWER_S
        while not health.dead.keys() >= {*alive}:
            if time.monotonic() > end:
                raise StartError(f"{name_ranks(alive).capitalize()} did not exit within {ANSWER_S:.0f} s of SIGKILL.")
            time.sleep(0.005)

    def _survey(self) -> None:
        self.lost = ask(self.connection, dict.fromkeys(self.survivors, protocol.FindLostShards(tuple(self.new))))
        self._groups = new_ranks.list_groups(self.connection, self.survivors)

    def _form(self) -> None:
        state, connection, layout = self.state, self.connection, self.layout
        groups = self._with_kept_groups()
        infos = state.rank_info
        if layout.hosts != state.layout.hosts:
            described = ask(connection, dict.fromkeys(self.new, protocol.Describe()))
            infos = tuple(described.get(rank, info) for rank, info in enumerate(infos))
        epoch = state.next_epoch()
        calls: dict[int, RankCall[Any]] = dict.fromkeys(self.survivors, protocol.RecoverAfterRepair(epoch))
        placements = place_ranks(layout, infos)
        store = store_address(connection, {info.host for info in (*infos, *state.rank_info)})
        for rank in self.new:
            config = join_config(layout, state.settings, rank, placements[rank], store, recoverable=True)
            calls[rank] = protocol.Join(config, epoch, tuple(group for group in groups if rank in group.ranks))
        joined = gather(self._send(calls), ANSWER_S, connection)
        if lost := {rank: joined[rank].lost_device for rank in self.survivors if joined[rank].lost_device}:
            state.health.feed(ContextsLost(tuple(lost)))
            raise StartError(f"The process groups were not rebuilt. {' '.join(lost.values())}")
        for rank in self.new:
            state.mark_replaced(rank, joined[rank], layout)

    def _with_kept_groups(self) -> list[protocol.GroupRecord]:
        """Add the groups of which no rank survives, as far as protection kept them."""
        by_name = {group.name: group for group in self._groups}
        for kept in ask(self.connection, {rank: protocol.ListKeptGroups(rank) for rank in self.new}).values():
            by_name |= {group.name: group for group in kept if set(group.ranks) <= set(self.new)}
        return sorted(by_name.values(), key=lambda group: (len(group.name), group.name))

    def _copy(self) -> None:
        assert self._source is not None
        self.copied = new_ranks.copy_namespace(self.connection, self.new, self.survivors, self._source, self._names)

    def _return(self) -> None:
        self.returned = new_ranks.return_to_protected(self.connection, self.state.ranks)


def raise_if_silent(state: ClusterState) -> None:
    """Raise StartError if the host agent does not respond."""
    if not state.connection.agent.responds(_AGENT_TIMEOUT_S):
        raise StartError(f"{AGENT_SILENT[0].upper()}{AGENT_SILENT[1:]}. Wait for it, or run `%distributed restart`.")


def _check_request(
    state: ClusterState, targets: Sequence[int], source: int | None, names: Sequence[str], all_allowed: bool
) -> None:
    if not targets and (source is not None or not (state.health.world.disabled or state.health.world.stuck)):
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
    stuck = sorted(state.health.world.stuck - set(targets))
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
        state: The cluster.
        interrupted: Whether the user waits for the end.
    """

    def __init__(self, state: ClusterState, interrupted: Callable[[], bool]) -> None:
        self._state, self._client, self._health = state, state.client, state.health
        self._agent, self._interrupted = AgentWatch(state.connection.agent), interrupted
        self._attempt_timeout_s = _SLOW_ATTEMPT_TIMEOUT_S if state.backend == "nccl" else _ATTEMPT_TIMEOUT_S
        self._rebuild = transitions.Rebuild()
        self._last_effects: tuple[transitions.RebuildEffect, ...] = ()
        self._futures: dict[int, Future[protocol.RecoveryReport]] = {}
        self._aborts: list[Answer[AbortReply]] = []

    def step(self) -> bool:
        """Do what is due; return True once the recovery is done, whether it worked or not."""
        health, before, seen = self._health, self._rebuild, self._look()
        attempt_s = self._attempt_timeout_s
        self._rebuild, effects = transitions.look(before, health.world, seen, attempt_s=attempt_s, remedy=health.remedy)
        if effects and effects != self._last_effects:  # an abort is sent again and again
            health.story.append(transitions.Entry(time.time(), before, seen, self._rebuild, effects))
        self._last_effects = effects or self._last_effects
        for effect in effects:
            self._perform(effect)
        return self._rebuild.is_done

    def _look(self) -> transitions.Look:
        now, futures = time.monotonic(), self._futures
        waiting = tuple(rank for rank, future in futures.items() if not future.done())
        failed = any(future.exception() is not None for rank, future in futures.items() if rank not in waiting)
        lost = () if waiting or failed else tuple(rank for rank, one in self._reports() if one.rebuilt.lost_device)
        acknowledged = all(future.done() for future in self._aborts)
        silent_s, interrupted = self._agent.silent_s(now), self._interrupted()
        return transitions.Look(now, silent_s, interrupted, waiting, failed, acknowledged, lost)

    def _reports(self) -> list[tuple[int, protocol.RecoveryReport]]:
        return [(rank, future.result()) for rank, future in self._futures.items()]

    def _perform(self, effect: transitions.RebuildEffect) -> None:
        match effect:
            case transitions.StartAttempt():
                call = protocol.Recover(self._state.next_epoch())
                self._futures = {rank: rpc.call(self._client, rank, call) for rank in self._state.ranks}
            case transitions.AbortAttempt():
                waiting = [rank for rank, future in self._futures.items() if not future.done()]
                self._aborts += [self._client.request(rank, AbortRequest(again=True)) for rank in waiting]
            case transitions.Disable(reason, ranks, until_back, warning):
                if warning:
                    print(warning, file=sys.stderr)
                self._health.feed(Disabled(reason, until_back))
                for rank in ranks:
                    rpc.call(self._client, rank, protocol.DisableGroups(reason))
            case transitions.GiveUp(ranks):
                self._health.feed(transitions.Stuck(ranks))
                for rank in ranks:
                    self._futures[rank].add_done_callback(functools.partial(self._replied, rank))
            case transitions.LoseContexts(ranks):
                print(
                    "\n".join(one.rebuilt.lost_device for rank, one in self._reports() if rank in ranks),
                    file=sys.stderr,
                )
                self._health.feed(ContextsLost(ranks))
            case transitions.Report():
                self._health.feed(transitions.Enabled())
                self._report(dict(self._reports()))

    def _replied(self, rank: int, _: Future[Any]) -> None:
        self._health.feed(transitions.Replied((rank,)))

    def _report(self, reports: Mapping[int, protocol.RecoveryReport]) -> None:
        # An aborted Gloo group cannot be freed: each keeps 2 threads and about 0.14 MiB until the rank exits.
        abandoned = max(one.rebuilt.abandoned for one in reports.values())
        if abandoned // _REPORT_EVERY > self._health.leaks_reported:
            self._health.leaks_reported = abandoned // _REPORT_EVERY
            print(
                f"{abandoned} abandoned process groups still hold threads on the ranks. Run `%distributed restart` "
                "when convenient to free them."
            )
        for line in dict.fromkeys(line for one in reports.values() for line in one.rebuilt.not_reset):
            print(line, file=sys.stderr)
        for line in describe_diverged_steps({rank: one.steps for rank, one in reports.items()}):
            print(line)


def auto_repair(state: ClusterState) -> None:
    """Replace the dead ranks, if there are any and they can be replaced, and print the report."""
    world = state.health.world
    possible = state.engines == "axon" and len(world.missing) < state.world_size and not (world.lost or world.stuck)
    possible = possible and can_replace(state.rank_info, state.backend)
    if world.dead and possible and not state.busy:
        print("\n".join(repair(state, None).lines(why=True)))


def rebuild_if_back(state: ClusterState) -> None:
    """Rebuild the groups that were disabled because ranks or the agent did not respond, if they do now; print it."""
    world = state.health.world
    is_due = bool(world.disabled) and world.until_back and not world.missing
    if not is_due or world.lost or state.busy:
        return
    try:
        if state.connection.agent.responds(_CELL_PATIENCE_S):
            print("\n".join(repair(state, None).lines()))
    except AxonError as error:
        state.health.feed(Disabled(world.disabled))
        print(f"Failed to rebuild the process groups: {error}")


def replace_stuck(state: ClusterState, ranks: Sequence[int]) -> list[str]:
    """Replace ranks that do not react, all of them if need be; return the lines to show, also if it fails."""
    if not ranks or state.health.disconnect_reason:
        return []
    try:
        if not state.connection.agent.responds(_CELL_PATIENCE_S):
            return [f"{name_ranks(ranks).capitalize()} cannot be replaced: {AGENT_SILENT}."]
        return repair(state, ranks, all_allowed=True).lines()
    except AxonError as error:
        return [f"Failed to replace {name_ranks(ranks)}: {error}"]
