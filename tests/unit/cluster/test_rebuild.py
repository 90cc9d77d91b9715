"""The rebuild of the groups after an aborted cell, whatever ranks and the host agent do: it ends, and says how."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from axon_nb.cluster.ranks.transitions import (
    AbortAttempt,
    ContextsLost,
    Died,
    Disable,
    Done,
    Event,
    GiveUp,
    Look,
    Rebuild,
    RebuildEffect,
    Repair,
    Report,
    StartAttempt,
    Step,
    Stuck,
    World,
    look,
    transition,
)


class Rebuilding:
    """A rebuild whose ranks reply, fail or wait as the caller wants."""

    def __init__(self, size: int = 3) -> None:
        self.world, self.rebuild, self.now = World(size), Rebuild(), 100.0
        self.effects: list[RebuildEffect] = []

    def look(self, seconds: float = 0.01, silent_s: float = 0.0, **seen: object) -> list[RebuildEffect]:
        self.now += seconds
        assert self.now < 300, "a rebuild has an end"
        self.rebuild, effects = look(
            self.rebuild,
            self.world,
            Look(self.now, silent_s, **seen),  # type: ignore[arg-type]
            attempt_s=10.0,
        )
        for effect in effects:
            if isinstance(effect, GiveUp):
                self.world, _ = transition(self.world, Stuck(effect.ranks))
        self.effects += effects
        return list(effects)


def kinds(effects: Sequence[RebuildEffect]) -> list[type]:
    return [type(effect) for effect in effects]


def test_groups_are_rebuilt_at_the_second_attempt() -> None:
    play = Rebuilding()
    assert kinds(play.look()) == [StartAttempt]
    assert not play.look(waiting=(1, 2))
    assert kinds(play.look(waiting=(1,), failed=True)) == [AbortAttempt]
    assert not play.look(waiting=(1,), failed=True), "the abort is not sent again at once"
    assert not play.look(failed=True, acknowledged=False), "a late abort would break the next attempt"
    assert not play.look(failed=True)
    assert kinds(play.look()) == [StartAttempt]
    assert kinds(play.look()) == [Report]
    assert play.rebuild.is_done


def test_third_failed_attempt_disables_the_groups() -> None:
    play = Rebuilding()
    while not play.rebuild.is_done:
        play.look(failed=play.rebuild.started_at is not None)
    assert kinds(play.effects) == [StartAttempt] * 3 + [Disable]
    assert play.effects[-1] == Disable(
        "the process groups could not be rebuilt; run `%distributed repair` to try again",
        (0, 1, 2),
        warning="The process groups could not be rebuilt. Run `%distributed repair` to try again.",
    )


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (Died(1, "exited"), "rank 1 is dead; run `%distributed repair` to replace it"),
        (
            Stuck((0, 2)),
            "ranks 0,2 are stuck in an earlier cell; run `%distributed repair --ranks 0,2` to replace them",
        ),
        (ContextsLost((1,)), "rank 1 is without a CUDA context; run `%distributed repair` to replace it"),
    ],
)
def test_missing_rank_ends_a_rebuild_at_any_time(happens: Event, reason: str) -> None:
    for moment in range(3):
        play = Rebuilding()
        for _ in range(moment):
            play.look(waiting=(1,))
        play.world, _ = transition(play.world, happens)
        (disable,) = play.look(waiting=(1,))
        assert isinstance(disable, Disable)
        assert (disable.reason, disable.until_back) == (reason, True)
        can_reply = {0, 1, 2} - {*play.world.dead} - play.world.stuck
        assert {*disable.ranks} == can_reply
        assert play.rebuild.is_done


def test_rank_that_never_replies_is_given_up() -> None:
    play = Rebuilding()
    while not play.rebuild.is_done:
        play.look(1.0, waiting=(2,))
    assert play.world.stuck == {2}
    assert set(kinds(play.effects)) == {StartAttempt, AbortAttempt, GiveUp, Disable}


def test_abort_that_is_never_acknowledged_ends_the_attempts() -> None:
    play = Rebuilding()
    while not play.rebuild.is_done:
        play.look(1.0, acknowledged=False)
    assert kinds(play.effects) == [StartAttempt] * 3 + [Disable]


@pytest.mark.parametrize("interrupted", [False, True])
def test_silent_agent_ends_a_rebuild_sooner_after_an_interrupt(interrupted: bool) -> None:
    play = Rebuilding()
    play.look()
    assert not play.look(silent_s=0.9, interrupted=interrupted, waiting=(0,))
    effects = play.look(silent_s=1.5, interrupted=interrupted, waiting=(0,))
    assert kinds(effects) == ([AbortAttempt, Disable] if interrupted else [])
    assert kinds(play.look(silent_s=11, waiting=(0,))) == ([] if interrupted else [AbortAttempt, Disable])


def test_rebuild_begins_once_a_repair_is_over() -> None:
    play = Rebuilding()
    play.world, _ = transition(play.world, Repair(()))
    assert not play.look()
    for step in (Step.SURVEY, Step.FORK, Step.FORM):
        play.world, _ = transition(play.world, Done(step))
    assert kinds(play.look()) == [StartAttempt]


def test_every_rebuild_ends() -> None:
    """Whatever is seen, and for however long."""
    for seed in range(500):
        draw, play = random.Random(seed), Rebuilding()
        while not play.rebuild.is_done:
            waiting = draw.choice([(), (0,), (1, 2)])
            play.look(
                draw.choice([0.01, 0.3, 5.0]),
                waiting=waiting if play.rebuild.started_at is not None else (),
                failed=draw.random() < 0.3,
                acknowledged=draw.random() < 0.3,
                silent_s=draw.choice([0.0, 0.5]),
            )
        assert kinds(play.effects).count(StartAttempt) <= 3
        assert kinds(play.effects)[-1] in {Report, Disable}


def test_interrupts_change_no_rebuild_while_the_agent_responds() -> None:
    for seed in range(200):
        draw, one, other = random.Random(seed), Rebuilding(), Rebuilding()
        while not one.rebuild.is_done:
            seconds, waiting = draw.choice([0.01, 0.3, 5.0]), draw.choice([(), (0,), (1, 2)])
            failed, silent_s = draw.random() < 0.3, draw.choice([0.0, 0.9])
            for play, interrupted in ((one, False), (other, True)):
                play.look(seconds, silent_s, waiting=waiting, failed=failed, interrupted=interrupted)
        assert one.effects == other.effects
