"""A cluster and its ranks at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from axon_nb.records.mesh import MeshInfo

__all__ = ["ClusterInfo", "RankInfo"]


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank of a cluster."""

    rank: int
    """Rank in the default group."""
    host: str
    """Name of the host it runs on."""
    pid: int
    """Process id on that host."""
    device: str
    """torch device it computes on: ``cpu``, ``cuda:0``."""
    backend: str
    """Backend of the default group: ``gloo`` or ``nccl``."""
    state: str
    """What it does, in words."""
    rss_bytes: int
    """Resident memory of the process, in bytes; 0 when not known."""
    device_bytes: int
    """Memory allocated on the accelerator, in bytes; 0 on CPU ranks."""
    cell: int | None
    """Number of the notebook cell that runs (its `In [n]`); None when idle."""


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """A cluster: its name, where it runs, and its ranks."""

    name: str
    """Name it was started under."""
    backend: str
    """Backend of the default group: ``gloo`` or ``nccl``."""
    host: str
    """Host or hosts, comma-separated."""
    num_ranks: int
    """Size of the world, dead ranks included."""
    running: bool
    """Whether cells can be sent."""
    engines: str
    """Name of the ipyparallel launcher that runs the ranks."""
    ranks: tuple[RankInfo, ...]
    """One record a rank, in rank order."""
    mesh: MeshInfo | None = None
    """The mesh that the ranks have made; None: none."""
