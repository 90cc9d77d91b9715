"""How an engine becomes a rank: what it says of itself, and how it joins the world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from axon_nb.records.protocol.messages import RankCall
from axon_nb.records.protocol.recovery import GroupRecord

__all__ = ["Describe", "Join", "JoinConfig"]


@dataclass(frozen=True, slots=True)
class JoinConfig:
    """How a rank joins its world; made in the notebook."""

    rank: int
    world_size: int
    local_rank: int
    """Index among the ranks of this host."""
    local_world_size: int
    """Number of ranks on this host."""
    node_rank: int
    """Index of this host."""
    backend: str
    """``gloo`` or ``nccl``."""
    store: str
    """Address of the rendezvous store: the path of a Unix socket, or ``tcp:<ip>:<port>``."""
    device: str
    """``cpu`` or ``cuda:<index>``."""
    threads: int
    """Number of intra-op threads of torch."""
    timeout_s: float
    """Limit of every collective, in seconds."""
    recoverable: bool
    """Whether groups can be rebuilt after a failure, as the self-test found."""
    output_limit: int
    """Bytes of text that one cell may print on this rank before lines are dropped and counted; a cell may set it."""
    master_addr: str = "127.0.0.1"
    """What scripts read from MASTER_ADDR; nothing listens there."""
    master_port: int = 29500
    """What scripts read from MASTER_PORT; nothing listens there."""


@dataclass(frozen=True, slots=True)
class Describe(RankCall[dict[str, Any]]):
    """Ask an engine, before it joins, for its place: host, pid, cores, GPUs, version, and the self-test's verdict."""

    target = "axon_nb.engine.bootstrap:describe"


@dataclass(frozen=True, slots=True)
class Join(RankCall[dict[str, Any]]):
    """Join the world; collective over all ranks. Returns the place, with device and seed."""

    target = "axon_nb.engine.bootstrap:join"
    config: JoinConfig
    epoch: int = 0
    """Number of the last rebuild of the groups; above 0 this rank replaces a dead one."""
    groups: tuple[GroupRecord, ...] = ()
    """The groups besides the default one that the rank it replaces was in."""
