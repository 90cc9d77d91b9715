"""What the notebook knows of one cluster: its connection, its ranks, how they are, and what runs on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axon_nb.cluster.failures.health import ActiveCell, Health
from axon_nb.cluster.failures.report import REPAIR
from axon_nb.cluster.launch import compatibility
from axon_nb.cluster.launch.connection import Connection
from axon_nb.cluster.launch.placement import Layout
from axon_nb.cluster.rpc.client import RankClient
from axon_nb.cluster.settings import Settings
from axon_nb.records.protocol.agent import SetInfo
from axon_nb.records.protocol.joining import Place
from axon_nb.records.protocol.wire import encode

__all__ = ["ClusterState"]


class ClusterState:
    """One cluster, shared by everything that deals with it.

    Args:
        connection: Its host agent and its client.
        layout: Its ranks, devices and backend.
        settings: Its own copy of the settings.
        name: What it is called.
        engines: Name of the ipyparallel launcher that runs the ranks.
        places: What each rank reported when it joined.
    """

    def __init__(
        self,
        connection: Connection,
        layout: Layout,
        settings: Settings,
        *,
        name: str,
        engines: str,
        places: Sequence[Place],
    ) -> None:
        self.name = name
        self.engines = engines
        """Name of the ipyparallel launcher that runs the ranks; ``axon``: forked from the host agent."""
        self.layout = layout
        self.connection = connection
        self.settings = settings
        self.launched: Any = None
        """ipyparallel's own object of the engines, in the process that launched them; None after an attach."""
        self.places = list(places)
        """What each rank says of itself."""
        self.active_cells: list[ActiveCell] = []
        """The cells that have been sent and not ended."""
        way_back = REPAIR if compatibility.can_replace(places, layout.backend) else compatibility.RESTART
        self.health = Health(name, lambda: list(self.active_cells), way_back=way_back)
        connection.agent.on_event(self.health.on_event)
        connection.client.on_registration(self.health.on_registration)

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
    def living(self) -> list[int]:
        """The ranks that are not dead."""
        return [rank for rank in self.ranks if rank not in self.health.dead]

    @property
    def busy(self) -> list[int]:
        """The ranks that run a cell now."""
        return sorted({rank for cell in list(self.active_cells) for rank in cell.unfinished})

    @property
    def running(self) -> bool:
        """Whether cells can be sent."""
        return not self.health.gone

    def replaced(self, rank: int, place: Place) -> None:
        """A fresh process has taken the place of `rank`."""
        self.places[rank] = place
        self.health.dead.pop(rank, None)
        self.health.stuck.discard(rank)
        self.health.lost.discard(rank)
        self.connection.agent.call(SetInfo({"places": encode(self.places, list[Place])}))
