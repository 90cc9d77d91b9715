"""What this rank is, for all modules of the engine: set when it joins, read everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["JoinConfig", "RankSession", "current"]


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
    """Path of the rendezvous store's Unix socket."""
    device: str
    """``cpu`` or ``cuda:<index>``."""
    threads: int
    """Number of intra-op threads torch gets."""
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


@dataclass
class RankSession:
    """The one rank of this process."""

    config: JoinConfig
    kernel: Any
    device: torch.device
    cell: int | None = None
    """Number of the notebook cell that runs; None when idle."""
    extras: dict[str, Any] = field(default_factory=dict)


_session: list[RankSession] = []


def current() -> RankSession:
    """The rank of this process.

    Raises:
        RuntimeError: the process has not joined a world.
    """
    if not _session:
        raise RuntimeError("this process is no rank of an axon_nb cluster")
    return _session[0]


def set_current(session: RankSession) -> None:
    """Make `session` the rank of this process."""
    _session[:] = [session]
