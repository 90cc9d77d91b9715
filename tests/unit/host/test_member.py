"""An agent that has joined a cluster: silence, cuts, refusals and delays of the notebook's agent, without processes."""

from __future__ import annotations

import random

import pytest

from axon_nb.host.membership import (
    Cut,
    Glance,
    Greet,
    HangUp,
    Join,
    Linked,
    MemberEvent,
    Membership,
    Missed,
    follow,
)


class Follower:
    """An agent that has joined, with a notebook's agent that does what the caller wants."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.membership = self.first = Membership(looked_at=self.now)
        self.events: list[MemberEvent] = []
        self.heard_at = self.now
        self.is_serving = True
        self.feed(Linked())

    def feed(self, event: MemberEvent) -> HangUp | Greet | Join | None:
        self.events.append(event)
        self.membership, effect = follow(self.membership, event)
        if isinstance(effect, HangUp):
            assert self.feed(Cut(self.now)) is None
        return effect

    def look(self) -> HangUp | Greet | Join | None:
        assert len(self.events) < 5000, "the loop spins"
        return self.feed(Glance(self.now, self.heard_at, self.is_serving))

    def pass_time(self, seconds: float) -> list[tuple[float, type]]:
        """Look as often as the loop does; when something was done."""
        began, found = self.now, list[tuple[float, type]]()
        while True:
            if (effect := self.look()) is not None:
                found.append((round(self.now - began, 1), type(effect)))
            due = self.membership.due(self.now, self.heard_at)
            end = began + seconds
            if self.membership.is_over or due > end:
                self.now = end
                return found
            assert due > self.now or effect is not None, "the loop would spin"
            self.now = max(self.now, due)


@pytest.mark.parametrize(("is_serving", "silence_s"), [(True, 31.0), (False, 181.0)])
def test_quiet_notebook_is_greeted_once_and_silent_one_left(is_serving: bool, silence_s: float) -> None:
    play = Follower()
    play.is_serving = is_serving
    (greeted, left, *again) = play.pass_time(silence_s + 1.2)
    assert greeted == (1.0, Greet)
    assert left == (silence_s, HangUp)
    assert {kind for _, kind in again} == {Join}


def test_notebook_that_is_heard_again_is_greeted_again_and_never_left() -> None:
    play = Follower()
    for _ in range(20):
        assert play.pass_time(5.0) == [(1.0, Greet)]
        play.heard_at = play.now


def test_follower_that_was_late_itself_excuses_the_notebook() -> None:
    play = Follower()
    play.look()
    play.now += 60.0
    assert play.look() is None
    assert play.pass_time(29.0) == [(1.0, Greet)]
    assert play.pass_time(2.5) == [(2.0, HangUp), (2.0, Join), (2.5, Join)]


def test_cut_link_is_dialled_twice_per_second_until_it_is_back_or_refused() -> None:
    play = Follower()
    play.feed(Cut(play.now))
    for _ in range(10):
        assert isinstance(play.look(), Join)
        assert play.look() is None
        play.feed(Missed(is_final=False))
        assert not play.membership.is_over
        play.now += 0.5
    play.heard_at = play.now
    play.feed(Linked())
    assert play.pass_time(0.9) == []
    play.feed(Cut(play.now))
    assert isinstance(play.look(), Join)
    play.feed(Missed(is_final=True))
    assert play.membership.is_over


def test_unreachable_notebook_is_given_up_after_five_minutes_from_each_cut() -> None:
    play = Follower()
    for _ in range(2):
        play.feed(Cut(play.now))
        began = play.now
        while play.now - began <= 300.0:
            if play.look():
                play.feed(Missed(is_final=False))
            assert not play.membership.is_over
            play.now += 0.5
        play.heard_at = play.now
        play.feed(Linked())
    play.feed(Cut(play.now))
    play.now += 300.1
    assert isinstance(play.look(), Join)
    play.feed(Missed(is_final=False))
    assert play.membership.is_over


def test_follower_does_the_same_for_the_same_events_and_joins_only_when_cut() -> None:
    for seed in range(300):
        draw, play, is_linked = random.Random(seed), Follower(), True
        for _ in range(60):
            play.now += draw.choice([0.0, 0.1, 0.6, 1.5, 40.0])
            if draw.random() < 0.3:
                play.heard_at = play.now
            effect = play.look()
            assert not (isinstance(effect, Join) and is_linked), "it has two links"
            assert not (isinstance(effect, Greet | HangUp) and not is_linked), "there is no link"
            if isinstance(effect, Join):
                is_linked = draw.random() < 0.3
                play.feed(Linked() if is_linked else Missed(is_final=False))
                play.heard_at = play.now
            elif isinstance(effect, HangUp):
                is_linked = False
            elif is_linked and draw.random() < 0.1:
                play.feed(Cut(play.now))
                is_linked = False
        membership = play.first
        for event in play.events:
            membership, _ = follow(membership, event)
        assert membership == play.membership
