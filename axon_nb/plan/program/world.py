"""What the lanes of a virtual clock share: collectives, which start with their last rank, messages, and links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from axon_nb.plan.errors import PlanError
from axon_nb.plan.hardware.links import Link
from axon_nb.plan.program.record import Call
from axon_nb.plan.program.uniform import Lane
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import format_bytes

_EQUALLY_LONG = ("all_reduce",)
"""Collectives whose tensors have one size on all ranks."""

LinkOf = Callable[[tuple[int, ...]], Link | None]
"""Returns the link between some ranks; None: calls take no time."""


@dataclass
class Meeting:
    """A collective of several lanes."""

    group: tuple[object, ...]
    missing: set[int]
    """Lanes that have not come."""
    first: tuple[int, Call]
    """The lane that came first, and its call."""
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
    """What lanes share: collectives, messages and links.

    Args:
        lanes: Together they stand for all ranks.
        link_of: Returns the link between some ranks.
        is_checked: Whether calls that meet must be alike.
    """

    def __init__(self, lanes: Sequence[Lane], link_of: LinkOf, *, is_checked: bool) -> None:
        self._lanes, self._is_checked = lanes, is_checked
        self.lane_of = {rank: number for number, lane in enumerate(lanes) for rank in lane.ranks}
        self.link_of = link_of
        self._meetings: dict[tuple[object, ...], Meeting] = {}
        self._ends: dict[tuple[object, ...], float] = {}
        self._sent: dict[tuple[int, int, int], float] = {}

    def lanes_in(self, ranks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Lanes of a group, and how many of its ranks each has."""
        return tuple(sorted(Counter(self.lane_of.get(rank, 0) for rank in ranks).items()))

    def meet(self, lane: int, key: tuple[object, ...], number: int, posted: Posted, ranks: tuple[int, ...]) -> None:
        """Bring a lane to a collective; the last one starts it.

        Raises:
            PlanError: the other lanes make another call.
        """
        members = {member for member, _ in self.lanes_in(ranks)}
        meeting = self._meetings.setdefault((*key, number), Meeting(key, members, (lane, posted.call)))
        self._check(lane, posted.call, *meeting.first)
        posted.meeting = meeting
        meeting.missing.discard(lane)
        meeting.arrivals[lane] = posted.arrival
        meeting.bytes = max(meeting.bytes, posted.call.bytes)
        if not meeting.missing:
            self.start(meeting, posted.call, ranks)

    def _check(self, lane: int, call: Call, other: int, others: Call) -> None:
        is_longer = call.name in _EQUALLY_LONG and call.bytes != others.bytes
        if self._is_checked and (call.name != others.name or is_longer):
            one, two = (f"{self.place_of(*which)}" for which in ((other, others), (lane, call)))
            what = [f"{each.name} of {format_bytes(each.bytes)}" if is_longer else each.name for each in (others, call)]
            raise PlanError(f"The program hangs, because calls do not match: {what[0]} {one}, but {what[1]} {two}.")

    def ranks(self, lane: int) -> tuple[int, ...]:
        """The ranks of a lane."""
        return self._lanes[lane].ranks

    def place_of(self, lane: int, call: Call) -> str:
        """Which ranks make a call, and where."""
        one = self._lanes[lane]
        return f"on {name_ranks(one.ranks)} in {one.record.places[call.place].text}"

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
