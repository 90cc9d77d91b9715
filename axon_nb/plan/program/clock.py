"""A virtual clock: plays the records of all ranks together, as streams of GPUs and links between them would run them.

A host issues operations to streams; operations of a stream run one after the other. A collective starts when its last
rank has reached it, and the calls of a group follow each other, as NCCL runs them. Sends do not wait for their
receivers. Ranks that do the same work are one lane.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, field

from axon_nb.plan.errors import PlanError
from axon_nb.plan.hardware import Link
from axon_nb.plan.program.record import MAIN_STREAM, Call, Lane, Place
from axon_nb.records.ranks import name_ranks
from axon_nb.records.spans import Span
from axon_nb.records.units import format_bytes

COMPUTE, LAUNCHES, COMMUNICATION, OTHERS = "compute", "launches", "communication, exposed", "waiting for other ranks"
_MAX_WAITS = 4
PARTS = COMPUTE, COMMUNICATION, OTHERS, LAUNCHES
_EQUALLY_LONG = ("all_reduce",)
"""Collectives whose tensors have one size on all ranks."""
LinkOf = Callable[[tuple[int, ...]], Link | None]
"""Returns the link between some ranks; None: calls take no time."""


class _Moment(Struct, frozen=True):
    """The end of a step."""

    seconds: float
    parts: Mapping[str, float]
    num_calls: int


class LaneTimes(Struct):
    """What the clock found for one lane."""

    lane: Lane
    spans: list[Span] = field(default_factory=list)
    total_s: float = 0.0
    steps: list[_Moment] = field(default_factory=list)
    """Ends of the steps of the first optimizer; before them the start of the program."""
    stuck_at: Place | None = None
    """Where it waited for a call that no lane makes; None: nowhere. Only where lanes may differ."""

    @property
    def step(self) -> tuple[dict[str, float], slice]:
        """Seconds of the last step by part, and which calls it made."""
        first, last = self.steps[-2:]
        parts = {name: last.parts[name] - first.parts[name] for name in PARTS}
        return parts, slice(first.num_calls, last.num_calls)


def play(
    lanes: Sequence[Lane], link_of: LinkOf, *, issue_s: float = 0.0, overlap: float = 1.0, is_complete: bool = True
) -> list[LaneTimes]:
    """Return each lane's spans, steps and parts.

    Args:
        lanes: Together they stand for all ranks.
        link_of: Returns the link between some ranks; None: calls take no time.
        issue_s: Seconds in which the host issues an operation.
        overlap: Fraction of communication beside computation that costs nothing, 0 to 1.
        is_complete: Whether each rank does what its lane does. If not, a call that no lane makes takes no time.

    Raises:
        PlanError: a rank would wait forever.
    """
    world = World(lanes, link_of, is_checked=is_complete)
    players = [_Player(number, lane, world, issue_s, overlap) for number, lane in enumerate(lanes)]
    while open_players := [player for player in players if not player.is_done]:
        moved = [player.advance() for player in open_players]
        if not any(moved):
            if is_complete:
                raise PlanError(_hang(players))
            open_players[0].give_up_waiting()
    return [player.finish() for player in players]


def _hang(players: Sequence[_Player]) -> str:
    waiting = [player.waits_for() for player in players if not player.is_done]
    ended = [rank for player in players if player.is_done for rank in player.ranks]
    more = f", and {len(waiting) - _MAX_WAITS} more" if len(waiting) > _MAX_WAITS else ""
    done = f"; {name_ranks(sorted(ended))} made all calls of the program" if ended else ""
    return f"The program hangs: {'; '.join(waiting[:_MAX_WAITS])}{more}{done}."


class _Player:
    """Plays the events of one lane."""

    def __init__(self, number: int, lane: Lane, world: World, issue_s: float, overlap: float) -> None:
        self._number, self._lane, self._world = number, lane, world
        self._issue_s, self._overlap = issue_s, overlap
        self._record = lane.record
        self._times = LaneTimes(lane)
        self._position = 0
        self._host = 0.0
        self._streams: defaultdict[int, float] = defaultdict(float)
        self._marks: dict[int, float] = {}
        self._posted: dict[int, Posted] = {}
        self._counts: Counter[object] = Counter()
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._computing: tuple[int, float, float] | None = None
        """Place, start and end of the span that is still growing."""
        seen: Counter[object] = Counter()
        self._keys: list[tuple[object, ...]] = []
        for ranks in self._record.groups:
            members = world.lanes_in(ranks)
            self._keys.append((members, seen[members]))
            seen[members] += 1
        self._times.steps.append(_Moment(0.0, dict(self._parts), 0))

    @property
    def is_done(self) -> bool:
        """Whether all events were played."""
        return self._position >= len(self._record.events)

    def advance(self) -> bool:
        """Play events until one must wait for another lane; return whether any was played."""
        first = self._position
        while not self.is_done:
            kind, stream, seconds, what = self._record.events[self._position]
            if kind == "wait" and not self._wait(stream, what):
                break
            if kind == "op":
                self._compute(stream, seconds, what)
            elif kind == "call":
                self._call(stream, what)
            elif kind == "record":
                self._marks[what] = self._streams[stream]
            elif kind == "wait_event":
                self._idle_until(stream, self._marks.get(what, 0.0), 0.0)
            elif kind == "sync":
                self._host = max(self._host, self._streams[stream])
            elif kind == "step" and what == 0:
                self._end_step()
            self._position += 1
        return self._position > first

    def give_up_waiting(self) -> None:
        """Go on, although no rank makes the call that this lane waits for."""
        posted = self._posted[self._record.events[self._position][3]]
        self._times.stuck_at = self._times.stuck_at or self._record.places[posted.call.place]
        posted.start, posted.end, posted.meeting = posted.arrival, posted.arrival, None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the lane."""
        return self._lane.ranks

    def waits_for(self) -> str:
        """Say where the lane waits, and for whom."""
        posted = self._posted[self._record.events[self._position][3]]
        call, meeting = posted.call, posted.meeting
        others = [call.peer] if meeting is None else [r for lane in meeting.missing for r in self._world.ranks(lane)]
        members = set(self._record.groups[call.group])
        whom = name_ranks(sorted(members.intersection(others)) or sorted(members))
        return f"{call.name} {self._world.place_of(self._number, call)} waits for {whom}"

    def finish(self) -> LaneTimes:
        """Return what was found."""
        self._close_span()
        total = max(self._streams.values(), default=0.0)
        if len(self._times.steps) < 2:
            self._end_step()
        for posted in self._posted.values():
            if self._resolved(posted):
                self._add_call(posted)
        self._times.total_s = total
        self._add("cell", "program", 0.0, total)
        self._times.spans.sort(key=lambda span: span.start_ns)
        return self._times

    def _end_step(self) -> None:
        self._times.steps.append(_Moment(self._streams[MAIN_STREAM], dict(self._parts), len(self._posted)))

    def _compute(self, stream: int, seconds: float, place: int) -> None:
        self._host += self._issue_s
        before = self._streams[stream]
        start = max(before, self._host)
        self._streams[stream] = start + seconds
        if stream != MAIN_STREAM:
            return
        self._parts[LAUNCHES] += start - before
        self._parts[COMPUTE] += seconds
        if self._computing is not None and self._computing[0] == place:
            self._computing = place, self._computing[1], start + seconds
        else:
            self._close_span()
            self._computing = place, start, start + seconds

    def _call(self, stream: int, number: int) -> None:
        self._host += self._issue_s
        call = self._record.calls[number]
        posted = self._posted[number] = Posted(call, max(self._streams[stream], self._host))
        ranks = self._record.groups[call.group]
        if call.name in ("send", "recv"):
            other = self._world.lane_of.get(call.peer, 0)
            count = self._counts[call.name, call.peer]
            self._counts[call.name, call.peer] += 1
            if call.name == "recv":
                posted.message = other, self._number, count
            else:
                posted.start = posted.arrival
                posted.end = posted.start + self._world.seconds("send", call.bytes, self._pair(call))
                self._world.send((self._number, other, count), posted.start)
            return
        key = self._keys[call.group]
        self._world.meet(self._number, key, self._counts[key], posted, ranks)
        self._counts[key] += 1

    def _pair(self, call: Call) -> tuple[int, ...]:
        return min(self._record.rank, call.peer), max(self._record.rank, call.peer)

    def _resolved(self, posted: Posted) -> bool:
        """Whether a call's end is known."""
        if posted.start is None and posted.meeting is not None and posted.meeting.start is not None:
            posted.start, posted.end = posted.meeting.start, posted.meeting.end
        elif posted.start is None and posted.message is not None:
            sent = self._world.sent(posted.message)
            if sent is not None:
                posted.start = max(posted.arrival, sent)
                posted.end = posted.start + self._world.seconds("recv", posted.call.bytes, self._pair(posted.call))
        return posted.start is not None

    def _wait(self, stream: int, number: int) -> bool:
        posted = self._posted[number]
        if not self._resolved(posted):
            return False
        assert posted.start is not None
        hidden = max(0.0, min(self._streams[stream], posted.end) - posted.start)
        end = max(self._streams[stream], posted.end) + (1 - self._overlap) * hidden
        self._idle_until(stream, end, posted.start)
        return True

    def _idle_until(self, stream: int, end: float, start: float) -> None:
        """Have a stream wait until `end`, for a call that all ranks had reached at `start`."""
        before = self._streams[stream]
        if end <= before:
            return
        self._streams[stream] = end
        if stream != MAIN_STREAM:
            return
        others = min(end - before, max(0.0, start - before))
        self._parts[OTHERS] += others
        self._parts[COMMUNICATION] += end - before - others
        self._close_span()
        self._add("wait", "wait", before, end)

    def _close_span(self) -> None:
        if self._computing is not None:
            place, start, end = self._computing
            entry = self._record.places[place]
            self._add(entry.phase, entry.phase, start, end, line=entry.line)
            self._computing = None

    def _add_call(self, posted: Posted) -> None:
        call = posted.call
        kind = "p2p" if call.name in ("send", "recv") else "collective"
        ranks = self._record.groups[call.group]
        group = f"{len(ranks)} ranks from {ranks[0]}"
        line = self._record.places[call.place].line
        self._add(kind, call.name, posted.arrival, posted.end, group=group, size=call.bytes, line=line)

    def _add(
        self, kind: str, name: str, start: float, end: float, *, group: str = "", size: int = 0, line: int = 0
    ) -> None:
        times = round(start * 1e9), round(end * 1e9)
        self._times.spans.append(Span(self._record.rank, kind, name, *times, group, size, line=line))


class Meeting(Struct):
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


class Posted(Struct):
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
