"""Snapshot of a cluster and its ranks."""

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
    """Host that it runs on."""
    pid: int
    """Process id on that host."""
    device: str
    """torch device, such as ``cpu`` or ``cuda:0``."""
    backend: str
    """Backend of the default group: ``gloo`` or ``nccl``."""
    state: str
    """What it is doing, in words."""
    rss_bytes: int
    """Resident memory of the process in bytes; 0 if unknown."""
    device_bytes: int
    """Memory allocated on the accelerator, in bytes; 0 on CPU ranks."""
    cell: int | None
    """Number of the running notebook cell (its `In [n]`); None when idle."""


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """A cluster: its name, where it runs, and its ranks."""

    name: str
    """Name given at the start."""
    backend: str
    """Backend of the default group: ``gloo`` or ``nccl``."""
    host: str
    """Host or hosts, comma-separated."""
    num_ranks: int
    """Number of ranks, including dead ones."""
    running: bool
    """Whether it accepts cells."""
    engines: str
    """Name of the ipyparallel launcher that runs the ranks."""
    ranks: tuple[RankInfo, ...]
    """One record per rank, in rank order."""
    mesh: MeshInfo | None = None
    """The device mesh created on the ranks, if any."""
