"""What this rank is, for all modules of the engine: set when it joins, read everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from axon_nb.records.protocol.joining import JoinConfig

__all__ = ["JoinConfig", "RankSession", "current"]


@dataclass
class RankSession:
    """The one rank of this process."""

    config: JoinConfig
    kernel: Any
    device: torch.device
    cell: int | None = None
    """Number of the notebook cell that runs; None when idle."""
    store: Any = None
    """The rendezvous store, kept here because torch keeps only its C++ half."""
    steps: Any = None
    """`OptimizerSteps`: the optimizer steps of this rank."""
    runner: Any = None
    """`CellRunner`: runs cells, and keeps their values until the notebook fetches them."""
    subgroup: Any = None
    """The process group that `subgroup` was bound to last."""
    packed: bytearray = field(default_factory=bytearray)
    """Variables on their way to a replaced rank."""
    offer: bytes | bytearray = b""
    """A value on its way to a notebook that shares no memory with this rank."""


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
