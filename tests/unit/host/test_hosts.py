"""The hosts of a cluster in every order of joining, silence, answers, cuts and stops, without processes.

`Play` imitates the connections of the notebook's agent and the processes at their other ends, so that what the machine
believes can be compared with what is true.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from axon_nb.host.membership import (
    NOTED,
    QUESTION,
    Admit,
    Answered,
    Ask,
    Close,
    Closed,
    Effect,
    Entry,
    Event,
    Exited,
    Introduced,
    Learn,
    Look,
    Reply,
    Report,
    Roster,
    Send,
    Stop,
    Tell,
    Wanted,
    tell,
    transition,
)
from axon_nb.records.protocol.agent import Exit, HostFacts, command_message
from axon_nb.records.protocol.agent import Stop as StopCommand
from axon_nb.records.protocol.wire import PROTOCOL, encode, own_version

HERE, FAR = "here", "far-host"
CLOSED = "its agent closed the connection"


class Play:
    """The notebook's agent, with links on which the other ends do what the caller wants."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.roster = self.first = Roster(HERE, looked_at=self.now)
        self.events: list[Event] = []
        self.story: list[Entry] = []
        self.heard: dict[int, float] = {}
        """By link that is open."""
        self.unread: set[int] = set()
        self.replies: dict[int, dict[str, Any]] = {}
        self.wanted: set[int] = set()
        self.asked: set[int] = set()
        """Links on which a question is out."""
        self.forked: dict[int, set[int]] = {}
        """By link, the ranks whose pid the host has sent, and whose exit nobody has reported."""
        self.reported: list[Exit] = []
        self.sent: list[Tell] = []
        self.names: list[str] = []
        self.closed: list[int] = []
        self._numbers = iter(range(1, 1_000_000))

    def feed(self, event: Event) -> list[Effect]:
        before = self.roster
        self.events.append(event)
        self.roster, effects = transition(before, event)
        if any(isinstance(effect, NOTED) for effect in effects):
            self.story.append(Entry(self.now, before, event, self.roster, effects))
        for effect in effects:
            self._perform(effect)
        return list(effects)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Close(link):
                assert link in self.heard, "a link is closed once"
                del self.heard[link]
                self.unread.discard(link)
                self.asked.discard(link)
                self.closed.append(link)
                assert not self.feed(Closed(link)), "what is closed here is lost already"
            case Reply(number, fields):
                assert number in self.wanted, "nobody waits, or it was answered"
                self.wanted.discard(number)
                self.replies[number] = dict(fields)
            case Report(exit):
                (link,) = [one for one, ranks in self.forked.items() if exit.rank in ranks]
                self.forked[link].discard(exit.rank)
                self.reported.append(exit)
            case Tell(link):
                assert link in self.heard
                self.sent.append(effect)
            case Admit(_, name):
                self.names.append(name)
            case Ask(link):
                assert link not in self.asked, "one question at a time"
                self.asked.add(link)
            case Learn(link):
                self.asked.remove(link)
            case Send(link, number):
                assert link in self.heard
                assert number in self.wanted

    def number(self) -> int:
        return next(self._numbers)

    def join(self, name: str = FAR, folder: str = "", *, is_only: bool = False, protocol: int = PROTOCOL) -> int:
        """An agent dials and introduces itself; its link."""
        link = self.number()
        self.heard[link] = self.now
        facts = HostFacts(name, folder or f"/run/{link}", 4, replace(own_version(), protocol=protocol), is_only)
        self.feed(Introduced(link, encode(facts)))
        return link

    def want(self, name: str = FAR, forks: int | None = None) -> int:
        number = self.number()
        self.wanted.add(number)
        self.feed(Wanted(number, name, forks))
        return number

    def answer(self, link: int, number: int, **fields: Any) -> list[Effect]:
        self.heard[link] = self.now
        forks = self.roster.hosts[link].waiting.get(number) if link in self.roster.hosts else None
        if forks is not None and "pid" in fields:
            self.forked.setdefault(link, set()).add(forks)
        return self.feed(Answered(link, number, fields))

    def fork(self, link: int, rank: int) -> None:
        number = self.want(self.roster.hosts[link].facts.name, rank)
        self.answer(link, number, pid=100 + rank)

    def leave(self, link: int, rank: int) -> list[Effect]:
        self.heard[link] = self.now
        return self.feed(Exited(link, Exit(rank=rank, pid=100 + rank, code=3, time_ns=0)))

    def close(self, link: int) -> list[Effect]:
        """The other end closes."""
        del self.heard[link]
        self.unread.discard(link)
        self.asked.discard(link)
        self.heard[link] = self.now  # `Close` removes it
        effects = self.feed(Closed(link))
        self.heard.pop(link, None)
        return effects

    def pass_time(self, seconds: float, answering: Iterable[int] = ()) -> list[Effect]:
        """Look as often as the loop does."""
        end, effects = self.now + seconds, list[Effect]()
        while True:
            effects += self.look()
            due = self.roster.due(self.now, self.heard)
            for link in {*answering} & self.asked:
                self.answer(link, QUESTION)
            if due == self.now and self.unread:  # the loop reads it now
                self.heard.update(dict.fromkeys(self.unread, self.now))
                self.unread.clear()
                continue
            if due is None or due > end:
                self.now = end
                return effects
            assert due > self.now, "the loop would spin"
            self.now = due

    def look(self) -> list[Effect]:
        heard = {link: self.heard[link] for link in self.roster.hosts}
        assert len(self.events) < 5000, "the loop spins"
        return self.feed(Look(self.now, heard, frozenset(self.unread)))

    def check(self) -> None:
        """Compare what is believed with what is true."""
        roster = self.roster
        assert {*roster.hosts} <= {*self.heard}, "a host is there with a closed link"
        names = [host.facts.name for host in roster.hosts.values()]
        assert len({HERE, *names}) == len(names) + 1, "names are unique"
        waiting = {number for host in roster.hosts.values() for number in host.waiting if number != QUESTION}
        assert waiting == self.wanted, "a command waits for a host that is gone, or is forgotten"
        if roster.stopped_at is None:
            ranks = {link: {*host.ranks} for link, host in roster.hosts.items() if host.ranks}
            assert ranks == {link: some for link, some in self.forked.items() if some}


def seconds_to_loss(play: Play, link: int, limit: float = 400.0) -> float:
    """Look as often as the loop does until a host is lost that does not answer."""
    began = play.now
    while link in play.roster.hosts:
        play.now = play.roster.due(play.now, play.heard) or play.now
        play.look()
        assert play.now - began < limit
    return play.now - began


def reasons(play: Play) -> list[tuple[int, str, str]]:
    return [(one.rank, one.host, one.host_lost) for one in play.reported]


def test_host_is_asked_twice_per_second_one_question_at_a_time() -> None:
    play = Play()
    link = play.join()
    assert play.look() == [Ask(link)]
    play.now += 0.7
    assert not play.look(), "the answer is due"
    assert play.answer(link, QUESTION, pid=1) == [Learn(link, {"pid": 1})]
    assert play.look() == [Ask(link)]
    play.answer(link, QUESTION)
    play.now += 0.3
    assert not play.look()
    assert play.roster.due(play.now, play.heard) == pytest.approx(play.now + 0.2)
    asks = play.pass_time(10.0, [link])
    assert len(asks) == 20


@pytest.mark.parametrize(("has_ranks", "silence_s"), [(True, 2.9), (False, 180.0)])
def test_silent_host_is_lost_with_its_ranks_and_commands(has_ranks: bool, silence_s: float) -> None:
    play = Play()
    link = play.join()
    if has_ranks:
        play.fork(link, 2)
        play.fork(link, 3)
    number = play.want()
    assert seconds_to_loss(play, link) == pytest.approx(silence_s)
    reason = f"its agent has not responded for {silence_s:.1f} s"
    assert reasons(play) == [(rank, FAR, reason) for rank in (2, 3) if has_ranks]
    assert play.replies[number] == {"refused": f"The host 'far-host' is no longer connected: {reason}."}
    assert play.closed == [link]
    assert play.roster.due(play.now, {}) is None
    play.check()


def test_host_whose_ranks_have_all_left_may_be_silent_again() -> None:
    play = Play()
    link = play.join()
    play.fork(link, 2)
    assert [one.exit.host for one in play.leave(link, 2) if isinstance(one, Report)] == [FAR]
    assert seconds_to_loss(play, link) > 100


def test_host_that_responds_in_time_or_whose_bytes_are_unread_stays() -> None:
    play = Play()
    link = play.join()
    play.fork(link, 2)
    play.pass_time(2.8)
    play.answer(link, QUESTION)
    play.pass_time(2.8)
    play.unread.add(link)
    play.now += 0.4
    play.look()
    assert link in play.roster.hosts
    play.unread.clear()
    play.look()
    assert link not in play.roster.hosts


def test_agent_that_was_late_itself_excuses_the_others_once() -> None:
    play = Play()
    link = play.join()
    play.fork(link, 2)
    play.look()
    play.now += 60.0
    assert play.look() == []
    assert play.roster.due(play.now, play.heard) == pytest.approx(play.now + 0.5)
    assert seconds_to_loss(play, link) == pytest.approx(2.9)
    assert play.reported[0].host_lost == "its agent has not responded for 2.9 s", "counted from when it was excused"


def test_closed_link_reports_each_rank_once() -> None:
    play = Play()
    link, other = play.join(), play.join("other")
    play.fork(link, 2)
    play.fork(link, 3)
    play.fork(other, 4)
    number, kept = play.want(), play.want("other")
    play.close(link)
    assert reasons(play) == [(2, FAR, CLOSED), (3, FAR, CLOSED)]
    assert play.replies.pop(number) == {"refused": f"The host 'far-host' is no longer connected: {CLOSED}."}
    assert not play.feed(Closed(link))
    assert not play.feed(Answered(link, number, {})), "late answers reach nobody"
    assert not play.feed(Exited(link, Exit(rank=2, pid=102, code=0, time_ns=0)))
    assert kept not in play.replies
    assert play.want() in play.replies
    assert play.replies.popitem()[1] == {"refused": "The host 'far-host' is not connected; connected: other."}
    play.check()


def test_rank_is_known_once_the_host_has_forked_it() -> None:
    play = Play()
    link = play.join()
    number = play.want(forks=2)
    assert play.roster.hosts[link].ranks == {}
    play.answer(link, number, refused="no")
    assert play.roster.hosts[link].ranks == {}
    assert play.replies[number] == {"refused": "no"}
    play.answer(link, play.want(), pid=7)
    assert play.roster.hosts[link].ranks == {}, "a pid says nothing unless a fork was asked for"
    play.fork(link, 2)
    assert play.roster.hosts[link].ranks == {2: 102}
    assert not play.answer(link, 999), "it was never asked for"
    assert not play.feed(Answered(link, None, {})), "a greeting"
    assert not play.leave(link, 3), "it has no such rank"
    play.check()


def test_names_are_unique() -> None:
    play = Play()
    links = [play.join(name) for name in (FAR, FAR, f"{FAR}-2", HERE, FAR)]
    assert play.names == [FAR, f"{FAR}-2", f"{FAR}-2-2", f"{HERE}-2", f"{FAR}-3"]
    play.close(links[1])
    play.join()
    assert play.names[-1] == f"{FAR}-2"
    play.check()


def test_agent_that_is_back_before_it_was_missed_takes_its_place() -> None:
    play = Play()
    link = play.join(folder="/run/a")
    play.fork(link, 2)
    number = play.want()
    again = play.join(folder="/run/a", is_only=True)
    assert (play.closed, play.names) == ([link], [FAR, FAR])
    assert reasons(play) == [(2, FAR, CLOSED)]
    assert number in play.replies
    assert {*play.roster.hosts} == {again}
    moments = [one.rpartition(" ")[0] for one in tell(play.story).get(FAR, "").split(", ")]
    assert moments == ["joined", "lost", "joined again"]
    play.check()


def test_agent_leaves_the_host_to_the_one_that_is_there() -> None:
    play = Play()
    link = play.join()
    late = play.join(is_only=True)
    reason = "Another agent serves the host 'far-host' by now, so this one exits."
    assert play.sent == [Tell(late, {"refused": reason})]
    assert {*play.roster.hosts} == {link}
    assert not play.roster.refused
    play.close(late)
    play.close(link)
    play.join(is_only=True)
    assert play.names == [FAR, FAR]


def test_other_version_is_refused_and_noted() -> None:
    play = Play()
    link = play.join(protocol=PROTOCOL + 1)
    (refusal,) = play.sent
    assert (refusal.link, (refusal.message["refused"],)) == (link, play.roster.refused)
    assert refusal.message["refused"].startswith(f"The host 'far-host' runs axon_nb {own_version().package} (protocol")
    assert "Install axon_nb" in refusal.message["refused"]
    assert not play.roster.hosts
    odd = play.number()
    play.heard[odd] = play.now
    play.feed(Introduced(odd, {"what": "fields of another version need not be ours"}))
    assert len(play.roster.refused) == 2
    assert not play.close(link)


def test_stop_reaches_each_host_once_and_no_exit_is_reported() -> None:
    play = Play()
    link, other = play.join(), play.join("other")
    play.fork(link, 2)
    number = play.want()
    play.feed(Stop(play.now))
    stop = command_message(-1, StopCommand())
    assert play.sent == [Tell(link, stop), Tell(other, stop)]
    assert not play.feed(Stop(play.now + 1))
    assert play.roster.is_stopping(play.now + 7.9)
    assert not play.roster.is_stopping(play.now + 8.1)
    assert not play.feed(Answered(link, -1, {}))
    play.pass_time(100.0)
    assert {*play.roster.hosts} == {link, other}, "silence no longer counts"
    play.close(link)
    assert not play.reported
    assert number in play.replies
    play.close(other)
    assert not play.roster.is_stopping(play.now)


def test_host_that_joins_while_the_cluster_stops_is_stopped() -> None:
    play = Play()
    play.join()
    play.feed(Stop(play.now))
    late = play.join("late")
    assert play.names[-1] == "late"
    assert play.sent[-1] == Tell(late, command_message(-1, StopCommand()))
    play.check()


def test_story_says_when_a_host_was_lost_and_joined() -> None:
    play = Play()
    play.now = time.mktime((2026, 11, 30, 14, 3, 11, 0, 0, -1))
    link = play.join()
    assert tell(play.story).get(FAR, "") == "", "nothing was lost"
    play.fork(link, 2)
    play.pass_time(449.6, [link])
    play.pass_time(5.0)
    moments = "joined 14:03:11, silent since 14:10:40, lost 14:10:43"
    assert tell(play.story).get(FAR, "") == moments
    play.now += 17
    link = play.join()
    assert tell(play.story).get(FAR, "") == f"{moments}, joined again 14:11:02"
    play.join("other")
    play.close(link)
    assert tell(play.story).get(FAR, "") == f"{moments}, joined again 14:11:02, lost 14:11:02"
    assert tell(play.story).get("other", "") == ""
    for _ in range(5):
        play.close(play.join())
    assert len(tell(play.story).get(FAR, "").split(", ")) == 5, "the last moments"
    for entry in play.story:
        assert transition(entry.before, entry.event) == (entry.after, entry.effects)


SEEDS = range(300)


@pytest.mark.parametrize("chunk", range(4))
def test_every_order_loses_a_host_once_and_answers_every_command(chunk: int) -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        draw = random.Random(1000 * chunk + seed)
        play = Play()
        for _ in range(draw.randint(5, 80)):
            _act(play, draw)
            play.check()
        assert len({*play.closed}) == len(play.closed)
        seen.update(type(event).__name__ for event in play.events)
        seen["silent"] += sum("not responded" in one.host_lost for one in play.reported)
        for link in list(play.roster.hosts):
            play.close(link)
        assert not play.wanted, "something waits for a host that is gone"
        assert play.roster.stopped_at is not None or not any(play.forked.values()), "an exit was not reported"
        roster = play.first
        for event in play.events:
            roster, _ = transition(roster, event)
        assert roster == play.roster, "the same events give the same roster"
    assert min(seen.values()) > 20, seen


def _act(play: Play, draw: random.Random) -> None:
    """Let one thing happen to the hosts."""
    kinds = [
        "join",
        "join",
        "want",
        "fork",
        "answer",
        "answer",
        "answer",
        "leave",
        "close",
        "wait",
        "wait",
        "wait",
        "unread",
    ]
    kind = draw.choice([*kinds, "late"] + ["stop"] * (draw.random() < 0.1))
    links = [*play.roster.hosts]
    link = draw.choice(links) if links else 0
    if kind == "join":
        folder = play.roster.hosts[link].facts.folder if links and draw.random() < 0.3 else ""
        name = draw.choice([FAR, "other", HERE])
        play.join(name, folder, is_only=draw.random() < 0.4, protocol=PROTOCOL + (draw.random() < 0.1))
    elif kind in {"want", "fork"}:
        rank = draw.choice(sorted({*range(8)} - {one for some in play.forked.values() for one in some}) or [None])
        busy = {one for host in play.roster.hosts.values() for one in host.waiting.values()}
        play.want(draw.choice([*play.roster.links, "nowhere"]), rank if kind == "fork" and rank not in busy else None)
    elif kind == "answer" and links and (waiting := play.roster.hosts[link].waiting):
        number = draw.choice([*waiting])
        fields: dict[str, Any] = {"pid": 5} if draw.random() < 0.8 else {"refused": "no"}
        play.answer(link, number, **fields)
        if draw.random() < 0.2 and number != QUESTION:
            assert not play.answer(link, number, **fields), "it has been answered"
    elif kind == "leave" and links:
        play.leave(link, draw.randrange(8))
    elif kind == "close" and play.heard:
        play.close(draw.choice([*play.heard]))
    elif kind == "wait":
        play.pass_time(draw.uniform(0.0, draw.choice([1.0, 8.0])), [one for one in links if draw.random() < 0.5])
    elif kind == "late":
        play.now += draw.uniform(1.1, 60.0)
        before = {*play.roster.hosts}
        play.look()
        assert {*play.roster.hosts} == before, "nobody is lost because this agent was late"
    elif kind == "unread" and links:
        play.unread ^= {link}
    elif kind == "stop":
        play.feed(Stop(play.now))
