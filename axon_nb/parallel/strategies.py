"""Sharding strategies and CPU offload modes."""

from __future__ import annotations

import enum
from typing import Any, TypeVar

from axon_nb.errors import UsageError

Choice = TypeVar("Choice", bound=enum.Enum)


class ShardingStrategy(enum.Enum):
    """Which model states are sharded over ranks."""

    FULL_SHARD = "full_shard"
    """Parameters, gradients and optimizer state (ZeRO-3)."""
    SHARD_GRAD_OP = "shard_grad_op"
    """The same between steps; parameters stay unsharded from forward to backward (torch's ZeRO-2). In the ZeRO paper's
    stage 2 each rank keeps all parameters between steps, too; torch has no such strategy."""
    NO_SHARD = "no_shard"
    """Nothing: every rank holds everything and gradients are averaged, as in DDP."""
    HYBRID_SHARD = "hybrid_shard"
    """FULL_SHARD within a node, replicated across nodes."""
    OPTIMIZER_STATE = "optimizer_state"
    """Only the optimizer state (ZeRO-1)."""


class CPUOffload(enum.Enum):
    """What is kept in host memory between uses. CPU ranks make the same moves within host memory."""

    NONE = "none"
    PARAMS = "params"
    """Parameters: copied to the device for each all-gather and for the optimizer step."""
    OPTIMIZER_STATES = "optimizer_states"
    """Optimizer states: copied to the device for the optimizer step."""
    FULL = "full"
    """Parameters, gradients and optimizer states; the optimizer step runs on the host."""


def parse_enum(kind: type[Choice], value: Any, name: str) -> Choice:
    """Return the enum member that is given itself or by its value.

    Raises:
        UsageError: there is no such member.
    """
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(f"{kind.__name__}.{item.name}" for item in kind)
        raise UsageError(f"{name} must be one of {names}; got {value!r}.") from None
