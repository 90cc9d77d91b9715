"""Delays that prove a change: a step with them, less what they add, is as long as one with the change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from axon_nb.records.performance.advice import advise
from axon_nb.records.performance.delays import StepDelays, common_order, step_delays
from axon_nb.records.performance.replay import Item, Recording, Run, Start
from tests.support.records.steps import (
    Part,
    Steps,
    after_backward,
    compute,
    gathered_twice,
    late_code,
    late_compute,
    late_data,
    long_sums,
    many_small,
    reduce,
    slow_loader,
    three_backwards,
)


def delayed(recording: Recording, delays: StepDelays) -> float:
    """Replay the steps with the delays, as ranks take them; return a step's length without what they add."""
    items: dict[int, Sequence[Item]] = {}
    for rank, own in recording.items.items():
        number, changed = 0, list[Item]()
        for item in own:
            if isinstance(item, Start):
                place, step = number % len(delays.during), recording.calls[item.key].step
                number += 1
                before = Run("own code", delays.before[rank][place], step)
                changed += [before, item, Run("own code", delays.during[place], step)]
            else:
                changed.append(item)
        items[rank] = changed
    return replace(recording, items=items).replay() - delays.added_s


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ((late_data, compute, reduce), "straggler: data"),
        ((late_code, compute, reduce), "straggler: own code"),
        ((late_compute, compute, reduce), "straggler: forward"),
        ((three_backwards,), "no_sync"),
        ((compute, many_small), "small buckets"),
        ((compute, gathered_twice), "resharding"),
        ((compute, long_sums), "communication"),
        ((compute, after_backward), "exposed communication"),
    ],
)
def test_step_with_delays_is_as_long_as_with_the_change(parts: tuple[Part, ...], cause: str) -> None:
    recording = Steps(*parts).recording()
    advice = next(one for one in advise(recording) if one.cause == cause)
    assert advice.changed is not None
    delays = step_delays(recording, advice.changed)
    assert delays is not None
    assert 1 - delayed(recording, delays) / recording.replay() == pytest.approx(advice.gain, abs=0.02)


def test_what_follows_the_last_collective_is_delayed_before_the_next_step() -> None:
    recording = Steps(compute, reduce, late_code).recording()
    (advice,) = advise(recording)
    assert advice.changed is not None
    delays = step_delays(recording, advice.changed)
    assert delays is not None
    # The replay itself says a little less: the ranks begin its first step apart.
    assert 1 - delayed(recording, delays) / recording.replay() == pytest.approx(15 / 47, abs=0.02)


def test_nothing_is_left_to_slow_if_all_ranks_are_faster_alike() -> None:
    recording = Steps(slow_loader, compute, reduce).recording()
    (advice,) = advise(recording)
    assert advice.cause == "data loading"
    assert advice.changed is not None
    assert step_delays(recording, advice.changed) is None
    assert common_order(recording) == ("all_reduce",)


def test_steps_with_other_collectives_cannot_be_delayed() -> None:
    def reduce_now_and_then(steps: Steps, step: int) -> None:
        if step % 2:
            reduce(steps, step)

    recording = Steps(late_compute, compute, reduce, reduce_now_and_then).recording()
    assert common_order(recording) == ()
    (straggler,) = [one for one in advise(recording) if one.cause == "straggler: forward"]
    assert straggler.changed is not None
    assert step_delays(recording, straggler.changed) is None
