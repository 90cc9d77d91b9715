"""Identity and configuration of this rank: set when it joins, read by all modules of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["JoinConfig", "RankSession", "current"]


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
    """``gloo`` or ``nccl``."""
    store: str
    """Path of the rendezvous store's Unix socket."""
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


@dataclass
class RankSession:
    """The rank of this process."""

    config: JoinConfig
    kernel: Any
    device: torch.device
    cell: int | None = None
    """Number of the running notebook cell; None while idle."""
    extras: dict[str, Any] = field(default_factory=dict)


_session: list[RankSession] = []


def current() -> RankSession:
    """The rank of this process.

    Raises:
        RuntimeError: the process has not joined a world.
    """
    if not _session:
        raise RuntimeError("this process is not a rank of an axon_nb cluster")
    return _session[0]


def set_current(session: RankSession) -> None:
    """Make `session` the rank of this process."""
    _session[:] = [session]
