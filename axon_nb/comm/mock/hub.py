"""Connects the ranks of a mock group, and combines their tensors, always in rank order.

Collectives match by call number, messages by sender, receiver and tag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.errors import CollectiveMismatchError, TensorError

_OPS: Any = dist.ReduceOp.RedOpType
_PAIRWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    _OPS.SUM: torch.add,
    _OPS.AVG: torch.add,
    _OPS.PRODUCT: torch.mul,
    _OPS.MIN: torch.minimum,
    _OPS.MAX: torch.maximum,
    _OPS.BAND: torch.bitwise_and,
    _OPS.BOR: torch.bitwise_or,
    _OPS.BXOR: torch.bitwise_xor,
}


@dataclass
class PendingCollective:
    """One collective in progress: the arguments of each rank that has called it."""

    name: str
    first_rank: int
    args_by_rank: dict[int, Any] = field(default_factory=dict)
    done: bool = False


@dataclass
class Message:
    """A tensor on its way."""

    tensor: torch.Tensor
    is_taken: bool = False
    """Whether a receiver has asked for it."""


class Hub:
    """Shared state of one mock group.

    Args:
        ranks: Global ranks, for messages.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._pending: dict[int, PendingCollective] = {}
        self._counts = [0] * len(ranks)
        self._channels: dict[tuple[int, int, int], _Channel] = {}

    def join(self, rank: int, name: str, args: Any, execute: Callable[[list[Any]], None]) -> PendingCollective:
        """Join a rank's next collective; the last rank to call executes it for all.

        Raises:
            CollectiveMismatchError: another rank made a different call.
        """
        number = self._counts[rank]
        self._counts[rank] += 1
        pending = self._pending.setdefault(number, PendingCollective(name, rank))
        if pending.name != name:
            raise CollectiveMismatchError(
                f"Collective mismatch: rank {self.ranks[pending.first_rank]} called {pending.name}, "
                f"rank {self.ranks[rank]} called {name} on the same group; all ranks must make the same calls in the "
                "same order."
            )
        pending.args_by_rank[rank] = args
        if len(pending.args_by_rank) == len(self.ranks):
            del self._pending[number]
            execute([pending.args_by_rank[member] for member in range(len(self.ranks))])
            pending.done = True
        return pending

    def absent_ranks(self, pending: PendingCollective) -> list[int]:
        """Return the global ranks that have not called it yet."""
        return [self.ranks[rank] for rank in range(len(self.ranks)) if rank not in pending.args_by_rank]

    def send(self, source: int, target: int, tag: int, tensor: torch.Tensor) -> Message:
        """Send a copy of `tensor`, so that the sender can continue."""
        channel = self._channels.setdefault((source, target, tag), _Channel())
        message = Message(tensor.detach().clone())
        channel.messages.append(message)
        channel.deliver()
        return message

    def receive(self, source: int, target: int, tag: int, on_message: Callable[[torch.Tensor], None]) -> None:
        """Pass the next unclaimed message to `on_message`; requests are served in order."""
        channel = self._channels.setdefault((source, target, tag), _Channel())
        channel.receivers.append(on_message)
        channel.deliver()

    def receive_any(self, target: int, tag: int) -> tuple[int, torch.Tensor] | None:
        """Take the oldest message of the lowest rank that has sent one; None if there is none."""
        for source in range(len(self.ranks)):
            channel = self._channels.get((source, target, tag))
            if channel is not None and channel.messages:
                message = channel.messages.popleft()
                message.is_taken = True
                return source, message.tensor
        return None


@dataclass
class _Channel:
    """A one-way channel between two ranks: queued messages and waiting receivers."""

    messages: deque[Message] = field(default_factory=deque)
    receivers: deque[Callable[[torch.Tensor], None]] = field(default_factory=deque)

    def deliver(self) -> None:
        while self.messages and self.receivers:
            message = self.messages.popleft()
            message.is_taken = True
            self.receivers.popleft()(message.tensor)


def combine(tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """Combine the tensors of all ranks into one.

    Raises:
        TensorError: mock worlds do not support the operation.
    """
    kind = next((kind for kind in _PAIRWISE if op == kind), None)
    if kind is None:
        raise TensorError(f"mock worlds support {', '.join(kind.name for kind in _PAIRWISE)}; got {op}.")
    total = tensors[0].detach().clone()
    for tensor in tensors[1:]:
        total = _PAIRWISE[kind](total, tensor.detach())
    return total / len(tensors) if kind is _OPS.AVG else total
