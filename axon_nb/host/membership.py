"""Who belongs to a cluster of several hosts, decided at both ends of a link.

`transition` takes what can happen to the hosts that joined (events) and returns what the notebook's agent does about it
(effects). `follow` is the same for an agent that has joined. Data in, data out, no clock: times come with the events,
monotonic and in seconds. `link` feeds the events and performs the effects.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from axon_nb.records.protocol import agent as messages
from axon_nb.records.protocol.wire import decode, read_version, refuse_join

QUESTION = 0
"""The number of the command that asks a host for its state; there is one at a time."""
_UNANSWERED = -1
_ASK_INTERVAL_S = 0.5
_HOST_SILENCE_S = 2.9
"""A host that has ranks and has not responded for this long is lost; after a cut of 2 s it has: `Greet`."""
_BUSY_SILENCE_S = 180.0
"""An agent does not respond while it imports torch: a second, or a minute on a busy machine."""
_STOP_TIMEOUT_S = 8.0
_RETRY_INTERVAL_S = 0.5
_NOTEBOOK_SILENCE_S = 30.0
"""The notebook's agent may be stopped or swapped out for a while; after this long, the ranks here are killed."""
_GIVE_UP_S = 300.0
_QUIET_S = 1.0
"""The notebook's agent asks twice per second; when it has not for this long, this one sends something by itself."""
_LATE_S = 2.0
_CLOSED = "its agent closed the connection"
_STORY_MOMENTS = 5
"""A report has so many moments of a host's story, the last ones."""


class Host(Struct, frozen=True):
    """What is known of a host that has joined."""

    facts: messages.HostFacts
    """What it said about itself, with its name in this cluster."""
    ranks: Mapping[int, int] = field(default_factory=dict)
    """Pid of each of its live ranks."""
    waiting: Mapping[int, int | None] = field(default_factory=dict)
    """Number of each command that it has not answered, and the rank that the command forks."""
    asked_at: float = 0.0
    """When it was last asked for its state."""


class Roster(Struct, frozen=True):
    """All that the notebook's agent knows of the other hosts."""

    own_name: str
    hosts: Mapping[int, Host] = field(default_factory=dict)
    """Those that are connected, by the number of the link."""
    refused: tuple[str, ...] = ()
    """Why hosts of another version could not join."""
    stopped_at: float | None = None
    looked_at: float = 0.0
    excused_at: float = 0.0
    """When this agent itself was late last: what was sent to it before may be still unread."""

    @property
    def links(self) -> dict[str, int]:
        """The link of each host, by name."""
        return {host.facts.name: link for link, host in self.hosts.items()}

    def heard_at(self, link: int, heard: Mapping[int, float]) -> float:
        """When its silence began."""
        return max(heard[link], self.excused_at)

    def lost_at(self, link: int, heard: Mapping[int, float]) -> float:
        """When it is lost, unless it responds before."""
        silence_s = _HOST_SILENCE_S if self.hosts[link].ranks else _BUSY_SILENCE_S
        return self.heard_at(link, heard) + silence_s if self.stopped_at is None else float("inf")

    def due(self, at: float, heard: Mapping[int, float]) -> float | None:
        """When to look again; None: there is nothing to look at."""
        asks = [one.asked_at + _ASK_INTERVAL_S for one in self.hosts.values() if QUESTION not in one.waiting]
        lost = [max(at, self.lost_at(link, heard)) for link in self.hosts]
        return min([at + _ASK_INTERVAL_S, *asks, *lost]) if self.hosts else None

    def is_stopping(self, at: float) -> bool:
        """Whether hosts that were stopped may still exit."""
        return bool(self.hosts) and at - (self.stopped_at or 0.0) < _STOP_TIMEOUT_S


class Introduced(Struct, frozen=True):
    """The agent at the other end of a link says who it is."""

    link: int
    fields: Mapping[str, Any]
    """Those of `HostFacts`, if its version is ours."""


class Closed(Struct, frozen=True):
    """A link is closed."""

    link: int


class Wanted(Struct, frozen=True):
    """A host is to perform a command."""

    number: int
    host: str
    forks: int | None = None
    """The rank that the command forks."""


class Answered(Struct, frozen=True):
    """A host has answered a command, or sent a message that answers none."""

    link: int
    number: int | None
    fields: Mapping[str, Any]


class Exited(Struct, frozen=True):
    """A rank of a host has exited."""

    link: int
    exit: messages.Exit


class Look(Struct, frozen=True):
    """Time has passed."""

    at: float
    heard: Mapping[int, float]
    """When something arrived last, by link."""
    unread: AbstractSet[int] = frozenset()
    """Overdue links on which something has arrived that is not read."""


class Stop(Struct, frozen=True):
    """The cluster stops."""

    at: float


Event = Introduced | Closed | Wanted | Answered | Exited | Look | Stop


class Admit(Struct, frozen=True):
    """Welcome a host by its name."""

    link: int
    name: str


class Tell(Struct, frozen=True):
    """Send an agent a message: why it cannot join, or that it is to stop."""

    link: int
    message: dict[str, Any]


class Close(Struct, frozen=True):
    """Close a link."""

    link: int


class Ask(Struct, frozen=True):
    """Ask a host for its state."""

    link: int


class Learn(Struct, frozen=True):
    """Take over a host's answer to that."""

    link: int
    fields: Mapping[str, Any]


class Send(Struct, frozen=True):
    """Send a host the command of this number."""

    link: int
    number: int


class Reply(Struct, frozen=True):
    """Answer whoever wanted the command of this number."""

    number: int
    fields: Mapping[str, Any]


class Report(Struct, frozen=True):
    """Report the exit of a rank."""

    exit: messages.Exit


Effect = Admit | Tell | Close | Ask | Learn | Send | Reply | Report
Result = tuple[Roster, tuple[Effect, ...]]
NOTED = (Admit, Tell, Close, Report)
"""The effects that make a transition a part of the story; any other is routine."""


def transition(roster: Roster, event: Event) -> Result:
    """Return the roster after `event`, and the effects that the caller performs, in this order."""
    match event:
        case Introduced(link, fields):
            return _introduce(roster, link, fields)
        case Closed(link):
            return _lose(roster, link, _CLOSED)
        case Wanted(number, name, forks):
            if (at := roster.links.get(name)) is None:
                known = ", ".join(sorted(roster.links)) or "none"
                reason = f"The host {name!r} is not connected; connected: {known}."
                return roster, (Reply(number, messages.refusal(reason)),)
            return _update(roster, at, waiting={**roster.hosts[at].waiting, number: forks}), (Send(at, number),)
        case Answered():
            return _answer(roster, event)
        case Exited(link, left):
            if link not in roster.hosts or left.rank not in (ranks := roster.hosts[link].ranks):
                return roster, ()
            report = Report(replace(left, host=roster.hosts[link].facts.name))
            return _update(roster, link, ranks=_without(ranks, left.rank)), (report,)
        case Look():
            return _look(roster, event)
        case Stop(at):
            if roster.stopped_at is not None:
                return roster, ()
            return replace(roster, stopped_at=at), tuple(map(_stop, roster.hosts))


def _stop(link: int) -> Tell:
    return Tell(link, messages.command_message(_UNANSWERED, messages.Stop()))


def _update(roster: Roster, link: int, **changes: object) -> Roster:
    return replace(roster, hosts={**roster.hosts, link: replace(roster.hosts[link], **changes)})


def _without(mapping: Mapping[int, Any], key: int) -> dict[int, Any]:
    return {one: value for one, value in mapping.items() if one != key}


def _introduce(roster: Roster, link: int, fields: Mapping[str, Any]) -> Result:
    if reason := refuse_join(f"The host {str(fields.get('name'))!r}", read_version(fields.get("version"))):
        return replace(roster, refused=(*roster.refused, reason)), (Tell(link, messages.refusal(reason)),)
    facts: messages.HostFacts = decode(messages.HostFacts, fields)
    effects: tuple[Effect, ...] = ()
    for other, host in roster.hosts.items():
        if host.facts.folder == facts.folder:  # it is back before it was missed
            roster, lost = _lose(roster, other, _CLOSED)
            effects += lost
    taken = roster.links
    if facts.is_only and facts.name in taken:
        # After a cut, the agent that was there joins again, and a repair may have started another one meanwhile.
        reason = f"Another agent serves the host {facts.name!r} by now, so this one exits."
        return roster, (*effects, Tell(link, messages.refusal(reason)))
    names = itertools.chain([facts.name], (f"{facts.name}-{number}" for number in itertools.count(2)))
    name = next(one for one in names if one != roster.own_name and one not in taken)
    effects = (*effects, Admit(link, name))
    if roster.stopped_at is not None:
        effects = (*effects, _stop(link))
    return replace(roster, hosts={**roster.hosts, link: Host(replace(facts, name=name))}), effects


def _lose(roster: Roster, link: int, reason: str) -> Result:
    if (host := roster.hosts.get(link)) is None:
        return roster, ()
    name = host.facts.name
    refusal = messages.refusal(f"The host {name!r} is no longer connected: {reason}.")
    replies = [Reply(number, refusal) for number in host.waiting if number != QUESTION]
    reports = [
        Report(messages.Exit(rank=rank, pid=pid, code=0, time_ns=0, host=name, host_lost=reason))
        for rank, pid in host.ranks.items()
        if roster.stopped_at is None
    ]
    return replace(roster, hosts=_without(roster.hosts, link)), (Close(link), *replies, *reports)


def _answer(roster: Roster, event: Answered) -> Result:
    host, number = roster.hosts.get(event.link), event.number
    if host is None or number is None or number not in host.waiting:
        return roster, ()
    ranks, forked = host.ranks, host.waiting[number]
    if forked is not None and "pid" in event.fields:
        ranks = {**ranks, forked: event.fields["pid"]}
    roster = _update(roster, event.link, waiting=_without(host.waiting, number), ranks=ranks)
    return roster, (Learn(event.link, event.fields) if number == QUESTION else Reply(number, event.fields),)


def _look(roster: Roster, event: Look) -> Result:
    at, heard, effects = event.at, event.heard, list[Effect]()
    excused_at = at if at - roster.looked_at > 2 * _ASK_INTERVAL_S else roster.excused_at
    roster = replace(roster, looked_at=at, excused_at=excused_at)
    for link, host in roster.hosts.items():
        if at >= roster.lost_at(link, heard) and link not in event.unread:
            silent_s = at - roster.heard_at(link, heard)
            roster, lost = _lose(roster, link, f"its agent has not responded for {silent_s:.1f} s")
            effects += lost
        # One question at a time: with few unacknowledged packets, TCP sends lost ones again after a constant time.
        elif QUESTION not in host.waiting and at >= host.asked_at + _ASK_INTERVAL_S:
            roster = _update(roster, link, asked_at=at, waiting={**host.waiting, QUESTION: None})
            effects.append(Ask(link))
    return roster, tuple(effects)


class Entry(Struct, frozen=True):
    """An event of the story, and what came of it."""

    at: float
    """Seconds since the epoch."""
    before: Roster
    event: Event
    after: Roster
    effects: tuple[Effect, ...]


def tell(story: Iterable[Entry]) -> dict[str, str]:
    """Say in a line, for each host that was lost, when it joined and was lost."""
    moments: dict[str, list[str]] = {}
    for entry in story:
        before, after = entry.before.links, entry.after.links
        for name in {name for name, _ in before.items() ^ after.items()}:
            of_host = moments.setdefault(name, [])
            if name in before and isinstance(entry.event, Look):
                silent_s = entry.event.at - entry.after.heard_at(before[name], entry.event.heard)
                of_host.append(f"silent since {_clock(entry.at - silent_s)}")
            if name in before:
                of_host.append(f"lost {_clock(entry.at)}")
            if name in after:
                of_host.append(f"joined {'again ' if of_host else ''}{_clock(entry.at)}")
    lost = {name: some for name, some in moments.items() if any(one.startswith("lost") for one in some)}
    return {name: ", ".join(some[-_STORY_MOMENTS:]) for name, some in lost.items()}


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


# ---- The other end: an agent that has joined -------------------------------------------------------------------------


class Membership(Struct, frozen=True):
    """What an agent knows of its link to the notebook's agent."""

    retry_at: float | None = None
    """When to join again; None: it is linked."""
    give_up_at: float = 0.0
    greeted_at: float = 0.0
    looked_at: float = 0.0
    excused_at: float = 0.0
    """When this agent itself was late last."""
    is_over: bool = False
    """Whether the cluster is gone, or unreachable for too long."""

    def due(self, at: float, heard_at: float) -> float:
        """When to look again."""
        quiet_at = max(heard_at, self.excused_at) + _QUIET_S
        return self.retry_at or (quiet_at if at < quiet_at else at + _QUIET_S)


class Linked(Struct, frozen=True):
    """It has joined, and serves the link."""


class Cut(Struct, frozen=True):
    """The link is closed."""

    at: float


class Missed(Struct, frozen=True):
    """It could not join again."""

    is_final: bool
    """Whether the notebook's agent is gone, or refused it; else the link may come back."""


class Glance(Struct, frozen=True):
    """Time has passed."""

    at: float
    heard_at: float
    """When something arrived last on the link."""
    is_serving: bool
    """Whether there are ranks on this host."""


class HangUp(Struct, frozen=True):
    """Close the link."""


class Greet(Struct, frozen=True):
    """Send an empty message.

    TCP sends what was lost on a cut link again after longer and longer times, which begin with the first of them. What
    is sent one second into the cut therefore arrives sooner after it than what was lost at its beginning. And it fails
    for good where the other end has given up this connection.
    """


class Join(Struct, frozen=True):
    """Try to join again."""


MemberEvent = Linked | Cut | Missed | Glance


def follow(membership: Membership, event: MemberEvent) -> tuple[Membership, HangUp | Greet | Join | None]:
    """Return the membership after `event`, and what the caller does then."""
    match event:
        case Linked():
            return replace(membership, retry_at=None), None
        case Cut(at):
            return replace(membership, retry_at=at, give_up_at=at + _GIVE_UP_S), None
        case Missed(is_final):
            return replace(membership, is_over=is_final or membership.looked_at > membership.give_up_at), None
        case Glance(at):
            excused_at = at if at - membership.looked_at > _LATE_S else membership.excused_at
            membership = replace(membership, looked_at=at, excused_at=excused_at)
    if membership.retry_at is None:
        heard_at = max(event.heard_at, excused_at)
        if at - heard_at > (_NOTEBOOK_SILENCE_S if event.is_serving else _BUSY_SILENCE_S):
            return membership, HangUp()
        if at >= heard_at + _QUIET_S and membership.greeted_at < heard_at:
            return replace(membership, greeted_at=at), Greet()
    elif at >= membership.retry_at:
        return replace(membership, retry_at=at + _RETRY_INTERVAL_S), Join()
    return membership, None
