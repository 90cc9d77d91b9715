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
        self._mail: dict[tuple[int, int, int], deque[torch.Tensor]] = {}

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
        """Leave a message; it is copied, so that the sender may go on."""
        self._mail.setdefault((source, target, tag), deque()).append(tensor.detach().clone())

    def take(self, source: int, target: int, tag: int) -> torch.Tensor | None:
        """The oldest message of `source`; None when there is none."""
        box = self._mail.get((source, target, tag))
        return box.popleft() if box else None
