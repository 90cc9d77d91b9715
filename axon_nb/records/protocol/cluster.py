"""What a cluster consists of, as the host agent stores it for a notebook that attaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from axon_nb.records.compatibility import Verdict
from axon_nb.records.protocol.version import Version
from axon_nb.records.protocol.wire import Packed

__all__ = ["ClusterFacts", "EngineInfo", "HostFacts", "Welcome"]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine's host, process and devices, as it reports them."""

    host: str
    pid: int
    """Process id on that host."""
    cores: int
    """Usable cores of the host."""
    gpus: int
    """GPUs that the process sees."""
    version: Version
    """The version that it runs."""
    self_test: Verdict
    """What does not work with the versions installed there."""
    device: str = ""
    """torch device; empty before it has joined."""
    seed: int | None = None
    """Initial seed of torch; None before it has joined."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """A host besides the notebook's, as its agent describes it when it joins."""

    name: str
    """Its host name; with a number if another host of the cluster has the same."""
    folder: str
    """The agent's private folder there."""
    cores: int
    """Usable cores."""
    version: Version
    """The version that its agent runs."""


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What the host agent stores about a cluster, for a notebook that attaches."""

    name: str
    world_size: int
    """Number of ranks, or of engines that have not joined a world."""
    keep_alive_s: float
    """How long ranks stay without a notebook, in seconds."""
    version: Version
    """The version of the notebook and the ranks when they started."""
    engines: str = ""
    """Name of the ipyparallel launcher that runs the ranks."""
    ip: str = "127.0.0.1"
    """The address on which the cluster listens."""
    settings: Mapping[str, bool | int | float] = field(default_factory=dict)
    """The cluster's settings, by name."""
    layout: Packed = None
    """Fields of `cluster.launch.placement.Layout`; None: the engines of a program, which no notebook can attach to."""
    rank_info: tuple[EngineInfo, ...] = ()
    """What each rank reported when it joined."""
    hosts: str = ""
    """The `--hosts` option that it was started with; empty: all ranks are on the notebook's host."""
    idle_stop_s: float = 0.0
    """The cluster stops itself when no cell has run for so many seconds; 0: never."""
    owner: str = ""
    """The notebook that connected last; the agent fills it in."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The notebook's agent accepts the agent of another host."""

    name: str
    """The name of the host in this cluster."""
    engine_file: Packed
    """The controller's connection file for engines, without its key."""
