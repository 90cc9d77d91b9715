"""The ranks of a cluster in every order of deaths, repairs, resizes and rebuilds, without processes.

`Play` imitates what carries the steps out, and the processes of the ranks, so that what the machine believes of a rank
can be compared with what is true.
"""

from __future__ import annotations

import functools
import os
import random
import signal
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from axon_nb.cluster.launch.placement import Layout
from axon_nb.cluster.ranks import transitions
from axon_nb.cluster.ranks.health import Health
from axon_nb.cluster.ranks.transitions import (
    Announce,
    ContextsLost,
    Died,
    Disabled,
    Done,
    Ended,
    Event,
    Failed,
    Look,
    Lost,
    Perform,
    Repair,
    Replied,
    Resize,
    Standing,
    Step,
    Stuck,
    Tell,
    World,
    transition,
)
from axon_nb.cluster.recovery.new_ranks import Work
from axon_nb.errors import ClusterLostError, StartError


class Play:
    """A cluster whose steps succeed, fail or are interrupted as the caller wants."""

    def __init__(self, size: int) -> None:
        self.world = World(size)
        self.first = self.world
        self.events: list[Event] = []
        self.processes = set(range(size))
        """The ranks whose process is alive."""
        self.unread: list[int] = []
        """Deaths that the host agent has not reported yet."""
        self.due: Perform | None = None
        self.end: Ended | None = None
        self.steps: list[Step] = []

    def feed(self, event: Event) -> None:
        self.events.append(event)
        self.world, effects = transition(self.world, event)
        for effect in effects:
            if isinstance(effect, Perform):
                assert effect is effects[-1]
                self.due = effect
                self.steps.append(effect.step)
                if effect.step is Step.COMMIT:
                    assert not self.world.dead, "a rank is dead from the start"
            elif isinstance(effect, Ended) and effect.refused:
                assert self.due is not None
            elif isinstance(effect, Ended):
                self.due, self.end = None, effect

    def ask(self, event: Repair | Resize) -> None:
        if self.due is None:
            self.steps, self.end = [], None
        self.feed(event)

    def die(self, rank: int) -> None:
        if rank in self.processes:
            self.processes.discard(rank)
            self.unread.append(rank)

    def read(self) -> None:
        """The host agent reports the deaths."""
        unread, self.unread = self.unread, []
        for rank in unread:
            self.feed(Died(rank, "was killed by SIGKILL"))

    def perform(self, error: str = "", *, interrupted: bool = False) -> None:
        """Do the step that is due, or fail in it."""
        assert self.due is not None
        step, change = self.due.step, self.world.change
        assert change is not None
        if step is Step.KILL or step is Step.REMOVE:
            for rank in change.new:
                self.die(rank)
        if step in {Step.KILL, Step.FORK}:
            self.read()  # a process is forked only once its predecessor is known to be dead
        if step is Step.FORK:
            self.processes |= {*change.new}
        if step is Step.COMMIT:
            for rank in [rank for rank in self.processes if rank >= change.size]:
                self.die(rank)
        self.feed(Failed(step, error) if error else Done(step, interrupted))

    def finish(self) -> str:
        """Do all that is left; the error with which it ends."""
        while self.due is not None:
            self.perform()
        assert self.end is not None
        return self.end.error

    def check(self) -> None:
        """Compare what is believed of the ranks with what is true."""
        if self.unread:
            return
        believed = {rank for rank in range(self.world.size) if rank not in self.world.dead}
        assert believed <= self.processes, "a rank is alive with a dead process"
        if self.world.change is None:
            assert believed == self.processes, "a rank is dead with a live process"


def after(play: Play, *failures: Step) -> tuple[list[str], str]:
    """The steps of a change that fails in these, and how it ends."""
    while play.due is not None:
        play.perform("It broke." if play.due.step in failures else "")
    assert play.end is not None
    return [step.name.lower() for step in play.steps], play.end.error


def broken(size: int, dead: Iterable[int]) -> Play:
    play = Play(size)
    for rank in dead:
        play.die(rank)
    play.read()
    return play


TABLE = """
dead | asked             | fails in        | steps
2    | repair 2          |                 | survey fork form return
2    | repair 2 from 0   |                 | survey fork form copy
     | repair 1          |                 | kill survey fork form return
2    | repair 1,2        |                 | kill survey fork form return
     | repair            |                 | survey fork form
2    | repair 2          | survey          | survey
2    | repair 2          | fork            | survey fork remove
2    | repair 2          | form            | survey fork form remove release disable
2    | repair 2          | form remove     | survey fork form remove release disable
2    | repair 2          | return          | survey fork form return
2    | repair 2 from 0   | copy            | survey fork form copy
     | resize 5          |                 | fork form copy stage commit
     | resize 2          |                 | stage form commit
     | resize 5          | fork            | fork remove release revert reconnect
     | resize 5          | copy            | fork form copy remove release revert reconnect
     | resize 5          | stage reconnect | fork form copy stage remove release revert reconnect release disable
     | resize 2          | form            | stage form remove release revert reconnect
     | resize 5          | commit          | fork form copy stage commit
"""
AGAIN = "It broke. Run `%distributed repair` to try again."
STILL = "It broke. The world still has 3 ranks. All its ranks keep their state."
SENTENCES = {
    "repair survey": "It broke.",
    "repair fork": AGAIN,
    "repair form": AGAIN,
    "repair return": (
        "Replaced rank 2, but failed to return to the last protected step: run `%distributed repair --ranks 2` to try "
        "again. It broke."
    ),
    "repair copy": "Replaced rank 2, but failed to copy the variables of rank 0: the new rank is empty. It broke.",
    "resize fork": STILL,
    "resize form": STILL,
    "resize copy": STILL,
    "resize stage": STILL,
    "resize commit": "The world has 5 ranks now, but: It broke.",
}
"""How a change ends that fails in a step."""


def numbers(text: str = "") -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(",") if one)


def asked(text: str) -> Repair | Resize:
    kind, *words = text.split()
    return (
        Resize(int(words[0])) if kind == "resize" else Repair(numbers(*words[:1]), int(words[2]) if words[2:] else None)
    )


@pytest.mark.parametrize("row", TABLE.strip().splitlines()[1:])
def test_steps_and_end_of_a_change(row: str) -> None:
    dead, wanted, fails, steps = (part.strip() for part in row.split("|"))
    play = broken(3, numbers(dead))
    play.ask(asked(wanted))
    error = SENTENCES[f"{wanted.split()[0]} {fails.split()[0]}"] if fails else ""
    assert after(play, *(Step[name.upper()] for name in fails.split())) == (steps.split(), error)
    play.check()
    has_form = Step.FORM in play.steps and wanted.startswith("repair")
    assert bool(play.world.disabled) == (Step.DISABLE in play.steps)
    assert not (has_form and not error and play.world.missing)


def test_new_rank_that_dies_once_it_has_joined_fails_the_repair() -> None:
    """All have replied by then: without its death the rank would be taken for alive."""
    play = broken(3, [2])
    play.ask(Repair((2,)))
    play.perform()
    play.perform()
    play.die(2)
    play.read()
    failed = "Rank 2 failed to start: it was killed by SIGKILL. Run `%distributed repair` to try again."
    assert play.finish() == failed
    assert play.world.disabled == "rank 2 could not be replaced; run `%distributed repair` to try again"
    play.check()
    play.ask(Repair((2,)))
    assert not play.finish()
    assert not play.world.missing
    assert not play.world.disabled


def test_new_rank_that_dies_before_the_world_grows_leaves_the_old_one() -> None:
    play = Play(2)
    play.ask(Resize(4))
    for _ in range(3):
        play.perform()
    for rank in (3, 2):  # the first is named
        play.die(rank)
        play.read()
    assert play.finish() == (
        "Rank 3 failed to start: it was killed by SIGKILL. The world still has 2 ranks. All its ranks keep their state."
    )
    assert play.world == World(2)


def test_rank_that_dies_while_the_world_grows_is_left_for_repair() -> None:
    play = Play(2)
    play.ask(Resize(3))
    play.perform()
    play.die(1)
    play.read()
    assert play.finish().endswith("The world still has 2 ranks. Run `%distributed repair` for rank 1.")
    assert play.steps[-1] is Step.DISABLE
    assert play.world.disabled == "rank 1 died during a resize; run `%distributed repair`"
    play.ask(Repair((1,)))
    assert not play.finish()
    assert play.world == World(2)


@pytest.mark.parametrize("number", range(4))
def test_interrupt_ends_a_resize_after_any_step_but_the_last(number: int) -> None:
    play = Play(2)
    play.ask(Resize(4))
    for _ in range(number):
        play.perform()
    play.perform(interrupted=True)
    assert play.finish().startswith("The resize was interrupted. The world still has 2 ranks.")
    assert play.world == World(2)


def test_one_change_at_a_time() -> None:
    play = broken(3, [2])
    play.ask(Repair((2,)))
    before = play.world
    for event in (Repair((1,)), Resize(4)):
        play.feed(event)
        assert play.world == before
    assert not play.finish()


def test_lost_cluster_ends_a_change_without_waiting_for_it() -> None:
    play = broken(3, [2])
    play.ask(Repair((2,)))
    play.perform()
    play.feed(Lost("lost its host agent"))
    play.perform("The host agent is gone.")
    assert play.due is None


SEEDS = range(300)


@pytest.mark.parametrize("chunk", range(4))
def test_every_order_ends_and_no_rank_is_alive_with_a_dead_process(chunk: int) -> None:
    ended = 0
    for seed in SEEDS:
        draw = random.Random(1000 * chunk + seed)
        play = Play(draw.randint(1, 4))
        for _ in range(draw.randint(5, 60)):
            _act(play, draw)
            play.check()
        play.read()
        play.finish() if play.due is not None else None
        play.read()
        play.check()
        ended += play.end is not None
        if play.world.missing:
            play.ask(Repair(tuple(sorted(play.world.missing))))
            assert not play.finish()
        assert not play.world.missing, "a repair without faults replaces all"
        world = play.first
        for event in play.events:
            world, _ = transition(world, event)
        assert world == play.world, "the same events give the same world"
    assert ended > len(SEEDS) / 2


def _act(play: Play, draw: random.Random) -> None:
    """Let one thing happen to a cluster."""
    world, rank = play.world, draw.randrange(max(1, play.world.size))
    kind = draw.choice(["die", "read", "step", "step", "step", "fail", "interrupt", "repair", "resize", "other"])
    if kind == "die" and play.processes:
        play.die(draw.choice(sorted(play.processes)))
        if draw.random() < 0.7:
            play.read()
    elif kind == "read":
        play.read()
    elif kind in {"step", "fail", "interrupt"} and play.due is not None:
        play.perform("It broke." if kind == "fail" else "", interrupted=kind == "interrupt")
        assert len(play.steps) <= 10, "a change has an end"
    elif kind == "repair":
        play.ask(Repair(tuple(sorted({*world.dead, *world.lost_contexts, rank})), draw.choice([None, 0])))
    elif (
        kind == "resize" and (play.due is not None or not world.missing) and (size := draw.randint(1, 6)) != world.size
    ):
        play.ask(Resize(size))
    elif kind == "other":
        one = (rank,)
        others: list[Event] = [Stuck(one), Replied(one), ContextsLost(one), Disabled("x"), transitions.Enabled()]
        play.feed(draw.choice(others))


def test_death_of_the_process_before_says_nothing_about_the_new_one() -> None:
    play = broken(2, [1])
    play.ask(Repair((1,)))
    play.perform()
    play.feed(Died(1, "disconnected", may_be_old=True))
    assert not play.finish()
    assert not play.world.missing


def test_dead_rank_is_announced_once_and_not_if_its_death_was_asked_for() -> None:
    world, effects = transition(World(2), Died(1, "exited with code 3"))
    assert effects == (Tell(1, "exited with code 3"), Announce(1, "exited with code 3"))
    world, effects = transition(world, Died(1, "disconnected"))
    assert effects == (Tell(1, "exited with code 3"),)
    world, _ = transition(World(2), Repair((0,)))
    assert transition(world, Died(0, "was killed by SIGKILL"))[1] == (Tell(0, "was killed by SIGKILL"),)


def test_late_reply_and_death_end_what_is_known_of_a_stuck_rank() -> None:
    world, _ = transition(World(3), Stuck((1, 2)))
    assert world.stuck == {1, 2}
    world, _ = transition(world, Replied((1,)))
    world, _ = transition(world, Died(2, "was killed"))
    assert (world.stuck, world.dead) == (set(), {2: "was killed"})
    assert transition(world, Stuck((2,)))[0].dead == {2: "was killed"}


def test_story_says_what_happened_and_gives_the_same_world_again(capsys: pytest.CaptureFixture[str]) -> None:
    health = Health("default", list, size=3)
    died, error = "rank 2 exited with code 3", "Rank 2 failed to start: it was killed by SIGKILL."
    health.feed(Died(2, "exited with code 3"))
    assert "Idle rank 2 exited with code 3." in capsys.readouterr().err
    due = health.feed(Repair((2,)))
    assert due == Perform(Step.SURVEY)
    health.feed(Done(Step.SURVEY))
    health.feed(Died(2, "was killed by SIGKILL"))
    health.feed(Failed(Step.FORK, error))
    end = health.feed(Done(Step.REMOVE))
    assert isinstance(end, Ended)
    told = [str(entry).partition(" ")[2] for entry in health.story]
    assert told == [
        f"Died {died}: rank 2 alive → dead; Tell {died}; Announce {died}",
        "Repair rank 2; Perform (ask the others)",
        "Done (ask the others): rank 2 dead → starting; Perform (fork)",
        "Died rank 2 was killed by SIGKILL: rank 2 starting → failed to start",
        f"Failed (fork) {error}: rank 2 failed to start → dead; Perform (kill the new ranks)",
        f"Done (kill the new ranks); Ended {end.error}",
    ]
    world = health.story[0].before
    for entry in health.story:
        assert isinstance(world, World)
        assert not isinstance(entry.event, Look)
        world, effects = transition(world, entry.event)
        assert effects == entry.effects
    assert world == health.world
    assert health.world.ranks[2].standing is Standing.DEAD


def test_story_keeps_the_last_events() -> None:
    health = Health("default", list, size=1)
    for number in range(500):
        health.feed(Disabled(str(number)))
    assert isinstance(health.story[-1], transitions.Entry)
    assert health.story[-1].event == Disabled("499")
    assert len(health.story) < 500


class Steps(Work):
    """A repair whose steps do what the caller wants."""

    def __init__(self, health: Health, actions: dict[Step, Callable[[], object]]) -> None:
        state: Any = SimpleNamespace(health=health, connection=None)
        super().__init__(state, Layout(3, "gloo", ("cpu",) * 3, None, 1), (2,))
        self._actions = actions
        self.done: list[Step] = []

    def steps(self) -> dict[Step, Callable[[], object]]:
        return {step: functools.partial(self._do, step) for step in Step}

    def _do(self, step: Step) -> None:
        self._actions.get(step, lambda: None)()
        self.done.append(step)


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [StartError("It broke."), ValueError("odd"), ClusterLostError("It is gone.")])
def test_change_ends_whatever_a_step_raises(error: Exception) -> None:
    health = Health("default", list, size=3)
    health.feed(Died(2, "exited with code 3"))
    work = Steps(health, {Step.FORM: functools.partial(fail, error)})
    with pytest.raises(type(error)) as raised:
        work.carry_out(Repair((2,)))
    assert work.done == [Step.SURVEY, Step.FORK, Step.REMOVE, Step.RELEASE, Step.DISABLE]
    assert health.dead == {2: "exited with code 3"}
    if isinstance(error, StartError):
        (note,) = raised.value.__notes__
        assert note.startswith("What happened:")
        assert "Repair rank 2" in note
        assert "exited with code 3" not in note, "it came before the repair"
    again = Steps(health, {})
    again.carry_out(Repair((2,)))
    assert again.done == [Step.SURVEY, Step.FORK, Step.FORM, Step.RETURN]
    assert not health.dead


def test_second_change_is_refused_and_leaves_the_first_alone() -> None:
    health = Health("default", list, size=3)
    other = Steps(health, {})
    first = Steps(health, {Step.FORK: lambda: other.carry_out(Repair((1,)))})
    with pytest.raises(StartError, match="Another repair is in progress: wait until it is done"):
        first.carry_out(Repair((2,)))
    assert not other.done
    assert first.done[-1] is Step.REMOVE


def test_interrupt_of_the_user_waits_for_the_step_and_undoes_a_resize() -> None:
    health = Health("default", list, size=2)
    work = Steps(health, {Step.COPY: lambda: os.kill(os.getpid(), signal.SIGINT)})
    with pytest.raises(StartError, match="The resize was interrupted"):
        work.carry_out(Resize(3))
    assert work.done == [Step.FORK, Step.FORM, Step.COPY, Step.REMOVE, Step.RELEASE, Step.REVERT, Step.RECONNECT]
    assert health.world == World(2)
