"""The notebook's state of one cluster: its connection, its ranks and their health, and the cells that run on them.

`Health` knows which ranks died and why, which are stuck, and whether the cluster is still there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from axon_nb.cluster.failures import REPAIR_HINT, RankError, describe_death
from axon_nb.cluster.launch import compatibility
from axon_nb.cluster.launch.connection import Connection
from axon_nb.cluster.launch.placement import Layout
from axon_nb.cluster.output.cell_output import BetweenCells
from axon_nb.cluster.rpc import RankClient
from axon_nb.cluster.settings import Settings, Value, settings_facts
from axon_nb.errors import ClusterLostError, UsageError
from axon_nb.records.protocol import agent as protocol
from axon_nb.records.protocol.wire import encode
from axon_nb.records.ranks import format_ranks, name_ranks
from axon_nb.records.slowness import Slowness
from axon_nb.records.units import format_seconds
from axon_nb.troubleshooting import more

_REPORT_INTERVAL_S = 5.0
"""While there are only short cells, the host agent learns of them at this interval."""
NCCL_UNTESTED = (
    "NCCL recovery is untested on multiple GPUs. The step in progress was lost, and ranks may be one step apart. "
    "If a rank does not come back, run `%distributed repair` or `%distributed restart`. (Shown once.)"
)
"""Shown when a cell fails on an NCCL cluster for the first time."""


class ClusterState:
    """The state of one cluster, shared by everything that works on it.

    Args:
        connection: Its host agent and its client.
        layout: Its ranks, devices and backend.
        settings: Its own copy of the settings.
        facts: What the host agent stores about it.
    """

    def __init__(
        self, connection: Connection, layout: Layout, settings: Settings, facts: protocol.ClusterFacts
    ) -> None:
        self.layout = layout
        self.connection = connection
        self.settings = settings
        self._facts = facts
        self.launched: Any = None
        """The ipyparallel object that launched the engines, in the process that did; None after an attach."""
        self.active_cells: list[ActiveCell] = []
        """The cells that are running."""
        replaceable = facts.engines == "axon" and compatibility.can_replace(facts.rank_info, layout.backend)
        remedy = REPAIR_HINT if replaceable else compatibility.RESTART
        self.is_paused = False
        """Whether NCCL's memory may have been given back, so that the next cell must let it take it again."""
        self.health = Health(facts.name, lambda: list(self.active_cells), remedy=remedy)
        self.between_cells = BetweenCells(self.ranks, limit_bytes=settings.output_limit)
        """Output that belongs to no running cell."""
        self._epoch = int(time.time())
        self._reported_busy, self._reported_at = False, 0.0
        connection.client.on_output(self._on_output)
        connection.agent.on_event(self.health.on_event)
        connection.client.on_registration(self.health.on_registration)
        connection.connect_directly(self.ranks)

    def _on_output(self, rank: int, msg_type: str, content: dict[str, Any]) -> None:
        # A thread that an earlier cell has started prints while another cell runs: it shows that, too.
        for run in list(self.active_cells):
            if rank in run.unfinished:
                run.on_output(rank, msg_type, content, {})
                return
        self.between_cells.feed(rank, msg_type, content)

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self._facts.name

    @property
    def engines(self) -> str:
        """Name of the ipyparallel launcher that runs the ranks; ``axon``: forked from the host agent."""
        return self._facts.engines

    @property
    def hosts(self) -> str:
        """The `--hosts` option that it was started with; empty: all ranks are on the notebook's host."""
        return self._facts.hosts

    @property
    def rank_info(self) -> tuple[protocol.EngineInfo, ...]:
        """What each rank reported when it joined."""
        return self._facts.rank_info

    @property
    def client(self) -> RankClient:
        """The ipyparallel client; engine ids are ranks."""
        return self.connection.client

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.layout.num_ranks

    @property
    def backend(self) -> str:
        """``gloo`` or ``nccl``."""
        return self.layout.backend

    @property
    def ranks(self) -> list[int]:
        """All ranks of the world."""
        return list(range(self.world_size))

    @property
    def live_ranks(self) -> list[int]:
        """The ranks that are not dead."""
        return [rank for rank in self.ranks if rank not in self.health.dead]

    @property
    def busy(self) -> list[int]:
        """The ranks that are running a cell."""
        return sorted({rank for cell in list(self.active_cells) for rank in cell.unfinished})

    @property
    def running(self) -> bool:
        """Whether cells can be sent."""
        return not self.health.disconnect_reason

    def next_epoch(self, *, above: int = 0) -> int:
        """Return the epoch of the next rebuild: higher than any before, and than `above`, the last of a rank."""
        self._epoch = max(self._epoch, above) + 1
        return self._epoch

    def mark_replaced(self, rank: int, info: protocol.EngineInfo, layout: Layout) -> None:
        """Record that a new process, which reported `info`, has replaced `rank`, where `layout` says."""
        rank_info = (*self.rank_info[:rank], info, *self.rank_info[rank + 1 :])
        self.health.dead.pop(rank, None)
        self.health.stuck.discard(rank)
        self.health.lost_contexts.discard(rank)
        self.layout = layout
        self._store(msgspec.structs.replace(self._facts, layout=encode(layout), rank_info=rank_info))
        self.connection.connect_directly([rank])

    def mark_resized(self, layout: Layout, rank_info: tuple[protocol.EngineInfo, ...]) -> None:
        """Record that the world has the ranks of `layout` now, which reported `rank_info`."""
        facts = msgspec.structs.replace(
            self._facts,
            world_size=layout.num_ranks,
            layout=encode(layout),
            rank_info=rank_info,
            slowness=self.slowness.on_world(layout.num_ranks),
        )
        self._store(facts)
        self.layout = layout
        self.connection.connect_directly(self.ranks)
        self.between_cells = BetweenCells(self.ranks, limit_bytes=self.settings.output_limit)

    def apply_settings(self, changed: Mapping[str, Value]) -> None:
        """Change the cluster's own copy of the settings, also for notebooks that attach later."""
        settings = dataclasses.replace(self.settings, **changed)  # type: ignore[arg-type]
        self._store(msgspec.structs.replace(self._facts, **settings_facts(settings)))
        self.settings = settings

    def report_activity(self) -> None:
        """Tell the host agent, without waiting, whether a cell runs; of short cells, now and then that there are some.

        It matters to a cluster that stops itself when it has been idle for minutes, and to lists of clusters.
        """
        now, is_busy = time.monotonic(), bool(self.active_cells)
        interval_s = min(_REPORT_INTERVAL_S, self.settings.idle_stop / 4 or _REPORT_INTERVAL_S)
        if is_busy == self._reported_busy and now - self._reported_at < interval_s:
            return
        self._reported_busy, self._reported_at = is_busy, now
        with contextlib.suppress(ClusterLostError):
            self.connection.agent.send(protocol.ReportActivity(is_busy))

    @property
    def slowness(self) -> Slowness:
        """What is slowed while cells run."""
        return self._facts.slowness

    def set_slowness(self, slowness: Slowness) -> None:
        """Slow this from the next cell on, also for notebooks that attach later.

        Raises:
            UsageError: the groups of these ranks are not ours, so nothing in them can be slowed.
        """
        if slowness and (self.backend == "nccl" or not compatibility.can_recover(self.rank_info, self.backend)):
            raise UsageError(
                f"Only groups of axon_nb over shared memory or Gloo can be slowed; these are {self.backend} groups of "
                "torch. Run `%distributed start --backend gloo`."
            )
        self._store(msgspec.structs.replace(self._facts, slowness=slowness))

    def rename(self, name: str) -> None:
        """Give the cluster another name, by which other notebooks and programs find it."""
        self._store(msgspec.structs.replace(self._facts, name=name))
        self.health.name = name

    def _store(self, facts: protocol.ClusterFacts) -> None:
        self.connection.agent.call(protocol.SetInfo(facts))
        self._facts = facts


class ActiveCell(Protocol):
    """A cell that runs on ranks and is notified of their deaths."""

    ranks: list[int]
    on_late_reply: Callable[[int], None]
    """Called with a rank that finishes the cell after the notebook stopped waiting for it."""

    @property
    def errors(self) -> Mapping[int, RankError]:
        """Failures by rank."""

    @property
    def unfinished(self) -> list[int]:
        """The ranks that have not finished the cell."""

    def on_output(self, rank: int, msg_type: str, content: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Process something that a rank printed or displayed; called from the IO thread."""

    def on_death(self, rank: int, reason: str) -> None:
        """Record that the rank's process died; called from any thread."""

    def on_lost(self, reason: str) -> None:
        """Record that the whole cluster is gone; called from any thread."""

    def interrupt(self) -> None:
        """Abort the cell on the user's behalf."""


class Health:
    """The state of a cluster's ranks, fed from any thread by the host agent's events and ipyparallel's registrations.

    Running cells are notified of each death.
    """

    def __init__(self, name: str, runs: Callable[[], list[ActiveCell]], *, remedy: str = REPAIR_HINT) -> None:
        self.name = name
        self._runs = runs
        self.remedy = remedy
        """How to get a dead or stuck rank back, as a sentence."""
        self.dead: dict[int, str] = {}
        """Why each dead rank died; reads after its name."""
        self.absent: set[int] = set()
        """Numbers of ranks that are not in the world: they left it, or do not belong to it yet."""
        self.expected_deaths: set[int] = set()
        """Ranks that are being terminated on request: their death is not reported."""
        self.stuck: set[int] = set()
        """Ranks that did not abort an earlier cell and have not replied since."""
        self.lost_contexts: set[int] = set()
        """Ranks that lost their CUDA context, on NCCL: they run cells but cannot communicate."""
        self.groups_disabled = ""
        """Why the process groups of all ranks are disabled; empty if they are not."""
        self.rebuild_when_back = False
        """Whether the next cell rebuilds disabled groups, if no rank is missing and the host agent responds."""
        self.leaks_reported = 0
        """How often threads that cannot be freed were reported."""
        self.disconnect_reason = ""
        """Why the cluster is gone; reads after its name. Empty while it is there."""
        self.lost_when = ""
        """When that happened, unless somebody stopped it; reads after the reason."""
        self._hinted: set[str] = set()

    def hint(self, kind: str, text: str) -> None:
        """Print a hint; each kind is shown once."""
        if text and kind not in self._hinted:
            self._hinted.add(kind)
            print("\n".join([text, *more(text)]))

    def on_event(self, event: protocol.AgentEvent) -> None:
        """Process an event of the host agent."""
        if self.disconnect_reason:
            return
        if isinstance(event, protocol.Exit):
            self.mark_dead(event.rank, describe_death(event))
        elif isinstance(event, protocol.ControllerExit):
            self.mark_lost(f"lost its ipyparallel controller (it {describe_death(event)})")
        elif isinstance(event, protocol.IdleStop):
            self.mark_lost(f"stopped itself after {format_seconds(event.idle_s)} without a cell (setting idle_stop)")
        elif isinstance(event, protocol.Stopped):
            self.mark_lost("was stopped by another program")
            self.lost_when = ""
        else:
            self.mark_lost("lost its host agent")

    def on_registration(self, event: dict[str, Any]) -> None:
        """Process a registration event of ipyparallel, the only sign that an engine of another launcher died."""
        if event["event"] == "unregister" and not self.disconnect_reason:
            self.mark_dead(int(event["id"]), "disconnected (its engine unregistered)")

    def mark_dead(self, rank: int, reason: str) -> None:
        """Record a death and notify the running cells; print it if the rank was idle."""
        if rank in self.absent:
            return
        is_new = rank not in self.dead
        self.dead.setdefault(rank, reason)
        self.stuck.discard(rank)
        runs = self._runs()
        for run in runs:
            run.on_death(rank, self.dead[rank])
        if rank in self.expected_deaths:
            self.expected_deaths.discard(rank)
        elif is_new and not any(rank in run.ranks for run in runs):
            text = f"Idle rank {rank} {reason}. {self.remedy}"
            print("\n".join([text, *more(text)]), file=sys.stderr, flush=True)

    def report_to(self, run: ActiveCell) -> None:
        """Notify a new cell of what is already known."""
        for rank, reason in list(self.dead.items()):
            run.on_death(rank, reason)
        if self.disconnect_reason:
            run.on_lost(self.disconnect_reason)

    def mark_lost(self, reason: str) -> None:
        """Record that the cluster is gone, and notify the running cells."""
        runs = self._runs()
        idle = "" if runs else ", while no cell was running"
        self.lost_when = f"at {time.strftime('%H:%M:%S')}{idle}"
        self.disconnect_reason = reason
        for run in runs:
            run.on_lost(reason)

    def ensure_available(self, ranks: Sequence[int]) -> None:
        """Check that a cell can run on these ranks.

        Raises:
            ClusterLostError: the cluster is gone, or one of the ranks is dead or stuck.
        """
        if self.disconnect_reason:
            raise ClusterLostError(
                f"The cluster {self.name!r} {self.disconnect_reason}. Run `%distributed start` to start a new one."
            )
        dead = [rank for rank in ranks if rank in self.dead]
        if dead:
            reasons = " ".join(f"Rank {rank} {self.dead[rank]}." for rank in dead)
            raise ClusterLostError(f"{reasons} {self.remedy} Use `--ranks` to run a cell on the remaining ranks.")
        stuck = [rank for rank in ranks if rank in self.stuck]
        if stuck:
            repair = f"Run `%distributed repair --ranks {format_ranks(stuck)}` to replace {name_ranks(stuck)}."
            raise ClusterLostError(
                f"{name_ranks(stuck).capitalize()} {'is' if len(stuck) == 1 else 'are'} still stuck in an earlier cell "
                f"(`%distributed status` shows where). {repair if self.remedy == REPAIR_HINT else self.remedy}"
            )

    def warn_nccl_untested(self) -> None:
        """Print once that NCCL recovery is untested; on the notebook's thread."""
        self.hint("nccl_untested", NCCL_UNTESTED)

    def track_stuck(self, run: ActiveCell) -> None:
        """Remember the ranks that are stuck in `run`; a late reply clears them, also between two calls of this."""
        stuck = {error.rank for error in run.errors.values() if error.kind == "stuck"}
        if stuck:
            run.on_late_reply = self.stuck.discard
            self.stuck |= stuck
            self.stuck -= stuck - set(run.unfinished)  # replied before they were added
