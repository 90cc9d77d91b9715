"""Where the ranks of one mock group meet: calls are matched by their number, messages by sender, receiver and tag."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from axon_nb.comm.errors import CallMismatch

__all__ = ["Hub", "Meeting"]


@dataclass
class Meeting:
    """One collective: what each rank brought, until all have."""

    name: str
    first: int
    brought: dict[int, Any] = field(default_factory=dict)
    done: bool = False


class Hub:
    """One a group, shared by its ranks.

    Args:
        ranks: Global ranks, for messages.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._meetings: dict[int, Meeting] = {}
        self._counts = [0] * len(ranks)
        self._lines: dict[tuple[int, int, int], _Line] = {}

    def join(self, rank: int, name: str, brings: Any, carry_out: Callable[[list[Any]], None]) -> Meeting:
        """One rank makes its next collective; the last one to come carries it out for all.

        Raises:
            CallMismatch: others make a different call as the same one.
        """
        number = self._counts[rank]
        self._counts[rank] += 1
        meeting = self._meetings.setdefault(number, Meeting(name, rank))
        if meeting.name != name:
            raise CallMismatch(
                f"rank {self.ranks[meeting.first]} calls {meeting.name} while rank {self.ranks[rank]} calls {name}, as "
                "the same call of one group: every rank makes the same calls in the same order."
            )
        meeting.brought[rank] = brings
        if len(meeting.brought) == len(self.ranks):
            del self._meetings[number]
            carry_out([meeting.brought[member] for member in range(len(self.ranks))])
            meeting.done = True
        return meeting

    def missing(self, meeting: Meeting) -> list[int]:
        """Global ranks that have not come."""
        return [self.ranks[rank] for rank in range(len(self.ranks)) if rank not in meeting.brought]

    def post(self, source: int, target: int, tag: int, tensor: torch.Tensor) -> None:
        """Leave a message for who has asked first; it is copied, so that the sender may go on."""
        line = self._lines.setdefault((source, target, tag), _Line())
        line.messages.append(tensor.detach().clone())
        line.deliver()

    def ask(self, source: int, target: int, tag: int, take: Callable[[torch.Tensor], None]) -> None:
        """Have `take` called with the next message that nobody has asked for before: in the order of asking."""
        line = self._lines.setdefault((source, target, tag), _Line())
        line.takers.append(take)
        line.deliver()

    def take_any(self, target: int, tag: int) -> tuple[int, torch.Tensor] | None:
        """The oldest message of the lowest rank that has sent one; None when there is none."""
        for source in range(len(self.ranks)):
            line = self._lines.get((source, target, tag))
            if line is not None and line.messages:
                return source, line.messages.popleft()
        return None


@dataclass
class _Line:
    """From one rank to another: messages and those that wait for them, in order."""

    messages: deque[torch.Tensor] = field(default_factory=deque)
    takers: deque[Callable[[torch.Tensor], None]] = field(default_factory=deque)

    def deliver(self) -> None:
        while self.messages and self.takers:
            self.takers.popleft()(self.messages.popleft())
