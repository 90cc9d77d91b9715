"""Change the number of ranks of a running cluster: new ranks are forked, others leave, all state is carried over.

What the new world needs is made beside the old state, in one exchange among the ranks of both worlds. Only when every
rank has its part does the host agent store the new world and do the ranks switch, which needs no communication. Until
then whatever fails leaves the old world, and from then on there is only the new one.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from axon_nb.cluster.launch.compatibility import refusal
from axon_nb.cluster.launch.engines import ANSWER_S, STATES_S, ask, gather, join_config, store_address
from axon_nb.cluster.launch.hosts import SCHEDULERS, parse_scheduler
from axon_nb.cluster.launch.placement import Layout, place_ranks, raise_if_over_quota, raise_if_too_few
from axon_nb.cluster.ranks.transitions import Resize, Step
from axon_nb.cluster.recovery import new_ranks
from axon_nb.cluster.recovery.repair import raise_if_silent
from axon_nb.errors import UsageError
from axon_nb.host.resources import usable_cores
from axon_nb.records.protocol import recovery as protocol
from axon_nb.records.protocol.agent import EngineInfo, Signal
from axon_nb.records.protocol.cells import AbortRequest
from axon_nb.records.protocol.wire import RankCall
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import count_of, format_bytes

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

_RESEND_INTERVAL_S = 0.25
_LEAVE_TIMEOUT_S = 5.0
_POLL_S = 0.005


def resize(state: ClusterState, size: int) -> ResizeReport:
    """Change the number of ranks to `size`; the lowest ranks stay.

    Args:
        state: The cluster.
        size: How many ranks there are afterwards.

    Raises:
        UsageError: that is not possible, or a variable cannot be carried over; nothing has changed.
        StartError: it failed; the message says which world there is.
    """
    _check_request(state, size)
    old = state.world_size
    obstacles = ask(state.connection, dict.fromkeys(state.ranks, protocol.FindObstacles(size)))
    if named := {name: why for found in obstacles.values() for name, why in found.items()}:
        raise UsageError("\n".join(f"`{name}` {why}." for name, why in named.items()))
    layout = _resized(state.layout, size, threads=state.settings.threads)
    layout = msgspec.structs.replace(layout, hosts=new_ranks.choose_hosts(state.connection, state.layout, size))
    work = _Resize(state, layout)
    work.carry_out(Resize(size))
    return ResizeReport(old, size, work.copied, work.committed)


def settle(state: ClusterState, resized_from: Mapping[int, int]) -> None:
    """End a resize whose notebook is gone, in the world that the host agent stored; the groups must be rebuilt.

    Args:
        state: The cluster, just attached to.
        resized_from: By rank that is alive, the number of ranks before, if it has the new size.

    Raises:
        StartError: a rank did not reply.
    """
    print(f"A resize was interrupted together with its notebook: the world has {count_of(state.world_size, 'rank')}.")
    before = max(resized_from.values())
    configs = _configs_of(state, state.layout, state.rank_info)
    for rank in resized_from:  # it may wait for a rank that is gone
        state.client.request(rank, AbortRequest()).wait(_RESEND_INTERVAL_S)
    old_size = 0 if before == state.world_size else before
    ask(state.connection, {rank: protocol.SettleResize(configs[rank], old_size) for rank in resized_from})


def _configs_of(state: ClusterState, layout: Layout, infos: Sequence[EngineInfo]) -> list[protocol.JoinConfig]:
    store = store_address(state.connection, {info.host for info in infos})
    return [
        join_config(layout, state.settings, rank, placement, store, recoverable=True)
        for rank, placement in enumerate(place_ranks(layout, infos))
    ]


def _check_request(state: ClusterState, size: int) -> None:
    if size < 1:
        raise UsageError(f"A world needs at least 1 rank; got {size}.")
    if size == state.world_size:
        raise UsageError(f"The world already has {count_of(size, 'rank')}.")
    if state.engines != "axon":
        raise UsageError(
            f"Only ranks that a host agent forks can be resized; these come from the launcher {state.engines!r}. Save "
            f"a checkpoint and start {count_of(size, 'rank')} instead."
        )
    if state.backend == "nccl":
        raise UsageError(
            f"Groups of NCCL cannot change their size. Save a checkpoint, run `%distributed stop` and "
            f"`%distributed start -n {size}`, then load it."
        )
    if reason := refusal(state.rank_info, state.backend):
        raise UsageError(reason)
    if state.hosts.partition(":")[0] in SCHEDULERS:
        parse_scheduler(state.hosts).raise_if_unreserved(size)
    if (world := state.health.world).missing or world.disabled:
        raise UsageError("Not all ranks can communicate: run `%distributed repair` first, then resize.")
    state.raise_if_busy("wait for it or interrupt it, then resize")
    if size > state.world_size:
        raise_if_too_few(size)
        raise_if_over_quota(size, besides=state.connection.run_dir)
    raise_if_silent(state)


def _resized(layout: Layout, size: int, *, threads: int) -> Layout:
    """Return the layout for another number of ranks; new ranks take their turns on the same devices."""

    def cycled(values: tuple[str, ...]) -> tuple[str, ...]:
        distinct = tuple(dict.fromkeys(values))
        return (
            (*values, *(distinct[rank % len(distinct)] for rank in range(len(values), size)))[:size] if values else ()
        )

    return msgspec.structs.replace(
        layout,
        num_ranks=size,
        devices=cycled(layout.devices),
        visible_by_rank=cycled(layout.visible_by_rank),
        threads=threads or max(1, usable_cores() // size),
    )


class _Resize(new_ranks.Work):
    """Performs the steps of one change of the number of ranks."""

    def __init__(self, state: ClusterState, layout: Layout) -> None:
        self._old, size = state.world_size, layout.num_ranks
        super().__init__(state, layout, range(self._old, size))
        self._leaving, self._staying = range(size, self._old), range(min(self._old, size))
        self._infos = state.rank_info[:size]
        self.committed: list[protocol.Committed] = []

    def steps(self) -> dict[Step, Callable[[], object]]:
        own = {Step.FORM: self._form, Step.COPY: self._copy, Step.STAGE: self._stage, Step.COMMIT: self._commit}
        return super().steps() | own | {Step.REVERT: self._revert, Step.RECONNECT: self._reconnect}

    def _form(self) -> None:
        described = ask(self.connection, dict.fromkeys(self.new, protocol.Describe()))
        self._infos = (*self._infos, *(described[rank] for rank in self.new))
        configs = _configs_of(self.state, self.layout, self._infos)
        self._send({rank: protocol.SetWorld(configs[rank]) for rank in self._staying})
        epoch = self.state.next_epoch()
        calls: dict[int, RankCall[Any]] = dict.fromkeys(self._staying, protocol.RecoverAfterRepair(epoch))
        self._connect(calls | {rank: protocol.Join(configs[rank], epoch) for rank in self.new})

    def _connect(self, calls: Mapping[int, RankCall[Any]]) -> None:
        gather(self._send(calls), ANSWER_S, self.connection)

    def _copy(self) -> None:
        self.copied = new_ranks.copy_namespace(self.connection, self.new, self._staying, 0, ())

    def _stage(self) -> None:
        stage = protocol.StageStates(self._old, self.layout.num_ranks)
        everyone = range(max(self._old, self.layout.num_ranks))
        gather(self._send(dict.fromkeys(everyone, stage)), STATES_S, self.connection)

    def _remove(self) -> None:
        super()._remove()
        for rank in self.new:
            self.connection.client.unregister(rank)

    def _revert(self) -> None:
        configs = _configs_of(self.state, self.state.layout, self.state.rank_info)
        self._send({rank: protocol.SetWorld(configs[rank]) for rank in self.state.live_ranks})

    def _reconnect(self) -> None:
        self._connect(dict.fromkeys(self.state.ranks, protocol.RecoverAfterRepair(self.state.next_epoch())))

    def _commit(self) -> None:
        self.state.mark_resized(self.layout, tuple(self._infos))
        calls = self._send(dict.fromkeys(self.state.ranks, protocol.CommitResize(self._old)))
        self._end_leaving()
        committed = gather(calls, ANSWER_S, self.connection)
        self.committed = [committed[rank] for rank in self.state.ranks]

    def _end_leaving(self) -> None:
        agent, client = self.connection.agent, self.connection.client
        for rank in self._leaving:
            agent.call(Signal(rank, int(signal.SIGTERM)))
        end = time.monotonic() + _LEAVE_TIMEOUT_S
        while not set(self._leaving) <= set(agent.exits) and time.monotonic() < end:
            time.sleep(_POLL_S)
        agent.kill_ranks([rank for rank in self._leaving if rank not in agent.exits], _LEAVE_TIMEOUT_S)
        for rank in self._leaving:
            client.unregister(rank)


class ResizeReport(Struct, frozen=True):
    """The result of `Cluster.resize`; displays as text."""

    old_size: int
    """Number of ranks before."""
    new_size: int
    """Number of ranks now."""
    copied: new_ranks.Copied
    """Variables that new ranks got."""
    committed: Sequence[protocol.Committed]
    """What each rank of the new world reports."""

    @property
    def functions(self) -> int:
        """Functions registered with `axon_nb.on_resize`, which all ranks called."""
        return max(one.functions for one in self.committed)

    def lines(self) -> list[str]:
        """Return the report as lines."""
        changed = name_ranks(range(min(self.old_size, self.new_size), max(self.old_size, self.new_size)))
        one = abs(self.new_size - self.old_size) == 1
        if self.new_size > self.old_size:
            what = f"{changed} {'is' if one else 'are'} new, with {self._copied()}"
        else:
            what = f"{changed} left"
        lines = [
            f"Resized the world from {self.old_size} to {self.new_size} ranks: {what}. The others keep their state."
        ]
        models, samplers = (max(getattr(one, name) for one in self.committed) for name in ("models", "samplers"))
        adapted = [(models, "model"), (samplers, "sampler")]
        if counts := [count_of(*each) for each in adapted if each[0]]:
            lines.append(f"Adapted {' and '.join(counts)} to {self.new_size} ranks.")
        lines += self.copied.not_copied()
        if left := sorted({name for one in self.committed for name in one.groups_left}):
            shown = ", ".join(f"`{name}`" for name in left)
            lines.append(f"Some ranks of {shown} left: recreate with `dist.new_group` on all ranks.")
        return lines

    def _copied(self) -> str:
        shown = self.copied.shown()
        return f"{shown} of rank 0 ({format_bytes(self.copied.size)})" if shown else "no variable"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__
