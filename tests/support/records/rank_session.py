"""A rank's session in the process of a test, which joins no world."""

from __future__ import annotations

import torch

from axon_nb.engine.session import RankSession
from axon_nb.records.protocol.recovery import JoinConfig


def session_of_rank(rank: int = 0) -> RankSession:
    """Return the session of one of two Gloo ranks on the CPU."""
    config = JoinConfig(
        rank, 2, 0, "cpu", 1, rank=rank, world_size=2, backend="gloo", store="", timeout_s=60.0, recoverable=True,
        output_limit=1000,
    )  # fmt: skip
    return RankSession(config, None, torch.device("cpu"))
