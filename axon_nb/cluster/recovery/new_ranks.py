"""New ranks of a running cluster: fork them, give them the state of other ranks, and report what they got and lost.

`Work` carries out a repair or a resize, step by step as `transitions` decides. With `protect`, all ranks return to the
last step that every one of them holds.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from axon_nb.cluster import rpc
from axon_nb.cluster.failures import REPAIR_HINT, Kept, RankError
from axon_nb.cluster.launch.engines import ANSWER_S, COPY_S, STATES_S, ask, await_handshake, raise_if_exited
from axon_nb.cluster.launch.launchers import fork_engines
from axon_nb.cluster.ranks.transitions import Done, Event, Failed, Perform, Repair, Resize, Step
from axon_nb.errors import AxonError, ClusterLostError, StartError, UsageError
from axon_nb.records.protocol import recovery as protocol
from axon_nb.records.protocol.agent import GetInfo
from axon_nb.records.protocol.cells import AbortRequest
from axon_nb.records.protocol.inspection import StatusRequest
from axon_nb.records.protocol.transfer import ListGroupVariables, PackNamespace, ReceiveNamespace, SendNamespace
from axon_nb.records.protocol.wire import RankCall
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import count_of, format_bytes

if TYPE_CHECKING:
    from axon_nb.cluster.launch.connection import Connection
    from axon_nb.cluster.launch.placement import Layout
    from axon_nb.cluster.state import ClusterState

_POLL_S = 0.05
_KILL_TIMEOUT_S = 5.0
_RELEASE_TIMEOUT_S, _RESEND_INTERVAL_S = 10.0, 0.25
_MIN_BYTES_PER_S = 20e6
_STATES_TIMEOUT_S = 1.0


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


class Work:
    """One repair or resize: subclasses perform its steps.

    Args:
        state: The cluster.
        layout: Where the ranks are afterwards.
        new: The ranks that get a new process.
    """

    closed_before = False
    """Whether an abort has closed the groups already."""

    def __init__(self, state: ClusterState, layout: Layout, new: Sequence[int]) -> None:
        self.state, self.connection, self.layout, self.new = state, state.connection, layout, new
        self.copied = Copied()
        self._interrupted = threading.Event()
        self._futures: list[tuple[int, Future[Any]]] = []

    def steps(self) -> dict[Step, Callable[[], object]]:
        """Return what performs each step."""
        return {
            Step.FORK: self._fork,
            Step.REMOVE: self._remove,
            Step.RELEASE: self._release,
            Step.DISABLE: self._disable,
        }

    def carry_out(self, asked: Repair | Resize) -> None:
        """Perform one step after the other, and what undoes them if one fails.

        Raises:
            UsageError: another one is in progress.
            StartError: it failed; the message says what there is now, and a note how it came about.
        """
        health, steps = self.state.health, self.steps()
        unforeseen: BaseException | None = None
        with interrupts_deferred() as self._interrupted:
            began, due = time.time(), health.feed(asked)
            while isinstance(due, Perform):
                try:
                    steps[due.step]()
                    event: Event = Done(due.step, self._interrupted.is_set())
                except BaseException as error:  # whatever it was, the change ends
                    if isinstance(error, ClusterLostError) or not isinstance(error, AxonError):
                        unforeseen = unforeseen or error
                    event = Failed(due.step, str(error))
                due = health.feed(event)
        if unforeseen is not None:
            raise unforeseen
        if due is not None and due.refused:
            raise UsageError(due.error)
        if due is not None and due.error:
            failure = StartError(due.error)
            failure.add_note("\n".join(["What happened:", *(f"  {one}" for one in health.story if one.at >= began)]))
            raise failure

    def _fork(self) -> None:
        fork_ranks(self.connection, self.layout, self.new, self._interrupted)

    def _send(self, calls: Mapping[int, RankCall[Any]]) -> dict[int, Future[Any]]:
        futures = {rank: rpc.call(self.connection.client, rank, call) for rank, call in calls.items()}
        self._futures += futures.items()
        return futures

    def _remove(self) -> None:
        # The next repair would take the exit of one that is left for that of its successor.
        self.connection.agent.kill_ranks(self.new, _KILL_TIMEOUT_S)

    def _release(self) -> None:
        """Release ranks from waiting for one that failed; until they are idle they cannot rebuild their groups."""
        end = time.monotonic() + _RELEASE_TIMEOUT_S
        again = self.closed_before
        while time.monotonic() < end:
            live = self.state.live_ranks
            waiting = {rank: future for rank, future in self._futures if not future.done() and rank in live}
            if not waiting:
                return
            for answer in [self.connection.client.request(rank, AbortRequest(again=again)) for rank in waiting]:
                answer.wait(_RESEND_INTERVAL_S)
            wait(waiting.values(), _RESEND_INTERVAL_S)
            again = True

    def _disable(self) -> None:
        for rank in self.state.live_ranks:
            rpc.call(self.connection.client, rank, protocol.DisableGroups(self.state.health.world.disabled))


def list_groups(connection: Connection, survivors: Sequence[int]) -> list[protocol.GroupRecord]:
    """Return the groups of all these ranks besides the default one, in the order of their creation."""
    by_name: dict[str, protocol.GroupRecord] = {}
    for groups in ask(connection, dict.fromkeys(survivors, protocol.ListGroups())).values():
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
    groups: dict[str, str] = {}
    for own_groups in ask(connection, dict.fromkeys(survivors, ListGroupVariables()), within=COPY_S).values():
        groups |= {name: group for name, group in own_groups.items() if not names or name in names}
    packed = ask(connection, {source: PackNamespace(tuple(names))}, within=10 * COPY_S)[source]
    receive = ReceiveNamespace(source, packed.size, packed.digest, groups)
    calls = {**dict.fromkeys(ranks, receive), source: SendNamespace(tuple(ranks))}
    ask(connection, calls, within=COPY_S + packed.size * len(ranks) / _MIN_BYTES_PER_S)
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
    if not client.wait_unregistered(ranks, ANSWER_S):
        raise StartError(f"The controller did not unregister {name_ranks(ranks)} within {ANSWER_S:.0f} s.")
    if connection.folder is not None:
        connection.folder.update(again=True)
    fork_engines(connection.agent, layout, ranks)
    end = time.monotonic() + ANSWER_S
    while not client.wait_registered(ranks, _POLL_S):
        raise_if_exited(connection, ranks)
        if interrupted.is_set():
            raise StartError(f"Interrupted before {name_ranks(ranks)} started.")
        if time.monotonic() > end:
            raise StartError(
                f"{name_ranks(ranks).capitalize()} did not start within {ANSWER_S:.0f} s; the logs are in "
                f"{connection.run_dir.path}."
            )
    await_handshake(connection, ranks, ANSWER_S)


def kept_of(state: ClusterState, protect: int, errors: Iterable[RankError]) -> Kept:
    """Say what is kept of ranks that died in a cell, and how to replace them.

    Args:
        state: The cluster.
        protect: The setting of this name.
        errors: How the cell failed.
    """
    remedy, died = state.health.remedy, sorted(error.rank for error in errors if error.kind == "died")
    if remedy != REPAIR_HINT or not died or not state.health.dead:
        return Kept(remedy)
    states = rpc.request_all(state.client, state.live_ranks, StatusRequest(), timeout_s=_STATES_TIMEOUT_S)
    steps = [one.protected for one in states.values() if one.protected is not None]
    if steps and len(steps) == len(state.live_ranks):
        last = "or to the last one before that all of them hold"
        remedy = f"new ranks get the state of the dead ones, and all ranks return to step {min(steps)}, {last}."
        text = f"Kept: the state of all ranks at step {min(steps)}, {last.replace('to', 'at', 1)}."
        return Kept(f"Run `%distributed repair`: {remedy}", text, min(steps))
    nothing = f"Nothing of {name_ranks(died)} is kept"
    if protect:  # a rank that is slow to answer may hold a step
        return Kept(remedy, f"{nothing}, unless `%distributed repair` finds a step that all ranks hold.")
    if state.engines != "axon" or sys.platform != "linux":
        return Kept(remedy, f"{nothing}.")
    return Kept(remedy, f"{nothing}. `%distributed config protect=on` keeps each step of all ranks.")


def return_to_protected(connection: Connection, ranks: Sequence[int]) -> Returned | None:
    """Return to the last step that all these ranks hold; None: there is none.

    Args:
        connection: The cluster's connection.
        ranks: All ranks; replacements have joined the groups.

    Raises:
        StartError: a rank exited, failed or did not reply in time.
    """
    held = ask(connection, dict.fromkeys(ranks, protocol.ListProtected()))
    common = _latest_common([one.held for one in held.values()])
    if common is None:
        return None
    call = protocol.RestoreProtected(common.run, common.fence)
    refused = ask(connection, dict.fromkeys(ranks, call), within=STATES_S)
    furthest = max(one.now for one in held.values())
    repeated = max(0, furthest - common.step)
    return Returned(common.step, repeated, {rank: lines for rank, lines in refused.items() if lines})


def _latest_common(held: Sequence[Sequence[protocol.ProtectedStep]]) -> protocol.ProtectedStep | None:
    first, *others = held
    return next((step for step in first if all(step in steps for steps in others)), None)


class Copied(Struct, frozen=True):
    """Variables that were copied to the replaced ranks."""

    names: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Why each of the others could not be; reads after its name."""
    size: int = 0
    """Bytes, to each rank."""

    def shown(self) -> str:
        """Name them, or the first of many; empty if there are none."""
        more = f" and {len(self.names) - 8} more" if len(self.names) > 8 else ""
        return ", ".join(f"`{name}`" for name in self.names[:8]) + more

    def not_copied(self) -> list[str]:
        """Return a line for each of the others."""
        return [f"Not copied: `{name}` {reason}." for name, reason in sorted(self.skipped.items())]


class Returned(Struct, frozen=True):
    """The step to which all ranks have returned."""

    step: int
    """Steps of the optimizer that has made most."""
    repeated: int
    """How many steps the rank that was furthest had made since."""
    refused: Mapping[int, Sequence[str]]
    """By rank, a line for each object that refused its state."""


class RepairReport(Struct, frozen=True):
    """The result of `Cluster.repair`; displays as text."""

    ranks: tuple[int, ...]
    """The replaced ranks; empty if only the process groups were rebuilt."""
    kept: tuple[int, ...]
    """The other ranks, which keep their state."""
    reasons: Mapping[int, str]
    """Why each replaced rank was dead; reads after its name. Empty for a live one that was replaced on request."""
    source: int | None = None
    """The rank whose variables were copied; None: the replaced ranks are empty."""
    copied: Copied = Copied()
    lost: tuple[protocol.LostShards, ...] = ()
    """What only the replaced ranks held."""
    returned: Returned | None = None
    """The protected step to which all ranks have returned; None: they are where they were."""

    def lines(self, *, why: bool = False) -> list[str]:
        """Return the report as lines; with `why`, also say why the ranks were dead."""
        if not self.ranks:
            return ["Rebuilt the process groups. All ranks keep their state."]
        one, replaced = len(self.ranks) == 1, name_ranks(self.ranks)
        reasons = ", ".join(dict.fromkeys(reason for reason in self.reasons.values() if reason)) if why else ""
        clause = f", which {reasons}" if reasons else ""
        if self.returned is not None:
            return self._returned_lines(f"Replaced {replaced}{clause}")
        content = "new and empty" if self.source is None else self._copied()
        others = "All other ranks keep their state." if self.kept else "No rank keeps its state."
        lines = [f"Replaced {replaced}{clause}: {content}. {others}"]
        lines += self.copied.not_copied()
        if self.lost:
            pronoun = "its part" if one else "their part"
            parts = " and ".join(str(part).replace("its part", pronoun) for part in self.lost)
            lines.append(f"Only {replaced} held {parts}: load a checkpoint on all ranks, or recreate them.")
        return lines

    def _returned_lines(self, replaced: str) -> list[str]:
        assert self.returned is not None
        step, repeated = self.returned.step, self.returned.repeated
        work = f"{count_of(repeated, 'step')} must be repeated" if repeated else "no step is lost"
        lines = [f"{replaced}. All ranks are back at step {step}: {work}."]
        refused = {line: rank for rank, all_lines in self.returned.refused.items() for line in all_lines}
        return [f"Not restored on rank {rank}: {line}." for line, rank in refused.items()] + lines

    def _copied(self) -> str:
        shown = self.copied.shown()
        what = f"{shown} ({format_bytes(self.copied.size)})" if shown else "no variable"
        return f"new, with {what} and the random state of rank {self.source}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__
