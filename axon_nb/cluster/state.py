"""The notebook's state of one cluster: its connection, its ranks and their health, and the cells that run on them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from axon_nb.cluster.failures import REPAIR_HINT
from axon_nb.cluster.launch import compatibility
from axon_nb.cluster.launch.connection import Connection
from axon_nb.cluster.launch.placement import Layout
from axon_nb.cluster.output.cell_output import BetweenCells
from axon_nb.cluster.ranks.health import ActiveCell, Health
from axon_nb.cluster.rpc import RankClient
from axon_nb.cluster.settings import Settings, Value, settings_facts
from axon_nb.errors import ClusterLostError, UsageError
from axon_nb.records.protocol import agent as protocol
from axon_nb.records.protocol.wire import encode
from axon_nb.records.ranks import name_ranks
from axon_nb.records.slowness import Slowness

_REPORT_INTERVAL_S = 5.0
"""While there are only short cells, the host agent learns of them at this interval."""


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
        self.health = Health(facts.name, lambda: list(self.active_cells), size=layout.num_ranks, remedy=remedy)
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
        dead = self.health.dead
        return [rank for rank in self.ranks if rank not in dead]

    @property
    def busy(self) -> list[int]:
        """The ranks that are running a cell."""
        return sorted({rank for cell in list(self.active_cells) for rank in cell.unfinished})

    def raise_if_busy(self, instead: str) -> None:
        """Raise UsageError if a cell runs; `instead` says what to do, and ends the sentence."""
        if busy := self.busy:
            raise UsageError(f"A cell is running on {name_ranks(busy)}: {instead}.")

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
