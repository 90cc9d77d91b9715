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
