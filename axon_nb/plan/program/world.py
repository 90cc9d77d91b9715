"""What the lanes of a virtual clock share: collectives, which start with their last rank, messages, and links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from axon_nb.plan.hardware.links import Link
from axon_nb.plan.program.record import Call
from axon_nb.plan.program.uniform import Lane

__all__ = ["LinkOf", "Meeting", "Posted", "World"]

LinkOf = Callable[[tuple[int, ...]], Link | None]
"""Returns the link between some ranks; None: calls take no time."""


@dataclass
class Meeting:
    """A collective of several lanes."""

    group: tuple[object, ...]
    missing: set[int]
    arrivals: dict[int, float] = field(default_factory=dict)
    bytes: int = 0
    start: float | None = None
    end: float = 0.0


@dataclass
class Posted:
    """A call of one lane."""

    call: Call
    arrival: float
    meeting: Meeting | None = None
    message: tuple[int, int, int] | None = None
    """A receive: the lanes of sender and receiver, and how many came before."""
    start: float | None = None
    end: float = 0.0


class World:
    """What lanes share: collectives, messages and links."""

    def __init__(self, lanes: Sequence[Lane], link_of: LinkOf) -> None:
        self.lane_of = {rank: number for number, lane in enumerate(lanes) for rank in lane.ranks}
        self.link_of = link_of
        self._meetings: dict[tuple[object, ...], Meeting] = {}
        self._ends: dict[tuple[object, ...], float] = {}
        self._sent: dict[tuple[int, int, int], float] = {}

    def lanes_in(self, ranks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Lanes of a group, and how many of its ranks each has."""
        return tuple(sorted(Counter(self.lane_of.get(rank, 0) for rank in ranks).items()))

    def meet(self, lane: int, key: tuple[object, ...], number: int, posted: Posted, ranks: tuple[int, ...]) -> None:
        """Bring a lane to a collective; the last one starts it."""
        members = {member for member, _ in self.lanes_in(ranks)}
        meeting = self._meetings.setdefault((*key, number), Meeting(key, members))
        posted.meeting = meeting
        meeting.missing.discard(lane)
        meeting.arrivals[lane] = posted.arrival
        meeting.bytes = max(meeting.bytes, posted.call.bytes)
        if not meeting.missing:
            self.start(meeting, posted.call, ranks)

    def start(self, meeting: Meeting, call: Call, ranks: tuple[int, ...]) -> None:
        """Run a collective of those that have come."""
        meeting.start = max(*meeting.arrivals.values(), self._ends.get(meeting.group, 0.0))
        meeting.end = self._ends[meeting.group] = meeting.start + self.seconds(call.name, meeting.bytes, ranks)

    def seconds(self, name: str, size: int, ranks: tuple[int, ...]) -> float:
        """How long a call takes."""
        link = self.link_of(ranks)
        return 0.0 if link is None else link.seconds("send" if name == "recv" else name, size, len(ranks))

    def send(self, message: tuple[int, int, int], seconds: float) -> None:
        """Note when a message is sent."""
        self._sent.setdefault(message, seconds)

    def sent(self, message: tuple[int, int, int]) -> float | None:
        """When a message was sent; None: it was not."""
        return self._sent.get(message)
