"""What is sharded, and what is offloaded, by name."""

from __future__ import annotations

import enum
from typing import Any, TypeVar

from axon_nb.comm.errors import CommError

__all__ = ["CPUOffload", "ShardingStrategy", "known"]

Choice = TypeVar("Choice", bound=enum.Enum)


class ShardingStrategy(enum.Enum):
    """What each rank keeps only its part of."""

    FULL_SHARD = "full_shard"
    """Parameters, gradients and optimizer state (ZeRO-3)."""
    SHARD_GRAD_OP = "shard_grad_op"
    """The same between steps; from forward to backward parameters stay whole (ZeRO-2)."""
    NO_SHARD = "no_shard"
    """Nothing: every rank has all, and gradients are averaged, as in DDP."""
    HYBRID_SHARD = "hybrid_shard"
    """As FULL_SHARD within a node; nodes have copies."""
    OPTIMIZER_STATE = "optimizer_state"
    """The optimizer state alone (ZeRO-1)."""


class CPUOffload(enum.Enum):
    """What is kept in the host's memory between uses; on CPU ranks the same moves are made, within it."""

    NONE = "none"
    PARAMS = "params"
    """Parameters: they come to the device for each all-gather, and for the optimizer's step."""
    OPTIMIZER_STATES = "optimizer_states"
    """The optimizer's states: they come to the device for its step."""
    FULL = "full"
    """Parameters, gradients and optimizer states, and the optimizer's step runs there."""


def known(kind: type[Choice], given: Any, name: str) -> Choice:
    """The member that is meant: itself, or by its value.

    Raises:
        CommError: there is none.
    """
    try:
        return kind(given)
    except ValueError:
        names = ", ".join(f"{kind.__name__}.{item.name}" for item in kind)
        raise CommError(f"{name}={given!r}: it is one of {names}.") from None
