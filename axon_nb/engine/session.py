"""Identity and configuration of this rank: set when it joins, read by all modules of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from axon_nb.records.protocol.joining import JoinConfig

__all__ = ["JoinConfig", "RankSession", "current", "own_rank"]


@dataclass
class RankSession:
    """The rank of this process."""

    config: JoinConfig
    kernel: Any
    device: torch.device
    cell: int | None = None
    """Number of the running notebook cell; None while idle."""
    store: Any = None
    """The rendezvous store, held here because torch holds only its C++ half."""
    steps: Any = None
    """`OptimizerSteps`: counts this rank's optimizer steps."""
    runner: Any = None
    """`CellRunner`: runs cells, and keeps their values until the notebook fetches them."""
    subgroup: Any = None
    """The process group that `subgroup` was last bound to."""
    namespace_payload: bytearray = field(default_factory=bytearray)
    """Packed variables to send to a replacement rank."""
    pending_value: bytes | bytearray = b""
    """A packed value that a notebook on another host will fetch."""


_session: list[RankSession] = []


def current() -> RankSession:
    """The rank of this process.

    Raises:
        RuntimeError: the process has not joined a world.
    """
    if not _session:
        raise RuntimeError("this process is not a rank of an axon_nb cluster")
    return _session[0]


def own_rank() -> int | None:
    """This process's rank; None if it is not a rank."""
    return _session[0].config.rank if _session else None


def set_current(session: RankSession) -> None:
    """Make `session` the rank of this process."""
    _session[:] = [session]
