"""How an engine becomes a rank: it describes itself, then joins the world."""

from __future__ import annotations

from dataclasses import dataclass

from axon_nb.records.protocol.cluster import EngineInfo
from axon_nb.records.protocol.messages import RankCall
from axon_nb.records.protocol.recovery import GroupRecord

__all__ = ["ENGINE_ENTRY", "Describe", "Join", "JoinConfig"]

ENGINE_ENTRY = "axon_nb.engine.bootstrap:run_engine"
"""Entry point of a forked rank, as ``module:function``."""


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
    group_memory: int = 0
    """Maximum size in bytes of the memory that one process group shares; 0: the usual size."""
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
