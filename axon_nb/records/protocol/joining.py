"""How an engine becomes a rank: what it reports, and how it joins the world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from axon_nb.records.compatibility import Verdict
from axon_nb.records.protocol.messages import RankCall
from axon_nb.records.protocol.recovery import GroupRecord
from axon_nb.records.protocol.version import Version
from axon_nb.records.protocol.wire import Packed

__all__ = ["ENGINE_ENTRY", "ClusterFacts", "Describe", "EngineInfo", "Join", "JoinConfig"]

ENGINE_ENTRY = "axon_nb.engine.bootstrap:run_engine"
"""Entry point of a forked rank, as ``module:function``."""


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
    owner: str = ""
    """The notebook that connected last; the agent fills it in."""


@dataclass(frozen=True, slots=True)
class JoinConfig:
    """How a rank joins its world; created in the notebook."""

    rank: int
    world_size: int
    local_rank: int
    """Index among the ranks of this host."""
    local_world_size: int
    """Number of ranks on this host."""
    node_rank: int
    """Index of this host."""
    backend: str
    """``shm``, ``gloo`` or ``nccl``. torch calls the groups of the first two ``gloo``."""
    store: str
    """Address of the rendezvous store: the path of a Unix socket, or ``tcp:<ip>:<port>``."""
    device: str
    """``cpu`` or ``cuda:<index>``."""
    threads: int
    """Number of torch's intra-op threads."""
    timeout_s: float
    """Timeout of every collective, in seconds."""
    recoverable: bool
    """Whether groups can be rebuilt after a failure, according to the self-test."""
    output_limit: int
    """Bytes of text that a cell may print on this rank; excess lines are dropped and counted. Cells can override it."""
    master_addr: str = "127.0.0.1"
    """The MASTER_ADDR that scripts see; nothing listens there."""
    master_port: int = 29500
    """The MASTER_PORT that scripts see; nothing listens there."""


@dataclass(frozen=True, slots=True)
class Describe(RankCall[EngineInfo]):
    """Have an engine describe itself, before it joins."""

    target = "axon_nb.engine.bootstrap:describe"


@dataclass(frozen=True, slots=True)
class Join(RankCall[EngineInfo]):
    """Join the world; collective over all ranks. Returns the description, with device and seed."""

    target = "axon_nb.engine.bootstrap:join"
    config: JoinConfig
    epoch: int = 0
    """Number of the last rebuild of the groups; above 0, this rank replaces one that died."""
    groups: tuple[GroupRecord, ...] = ()
    """Groups besides the default one that the replaced rank was in."""
