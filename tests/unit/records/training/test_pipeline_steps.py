"""Pipeline steps: simulated without waiting, found among spans, compared with their ideal."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_nb.records.spans import Span
from axon_nb.records.training.steps import Action, bubble_fraction, last_steps, play, simulate_orders

LENGTHS = {"F": 0.01, "B": 0.02, "I": 0.01, "W": 0.01}


def gpipe(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """All forwards, then all backwards."""
    numbers = range(num_microbatches)
    return [[("F", r, m) for m in numbers] + [("B", r, m) for m in numbers] for r in range(num_ranks)]


def shifted(spans: list[Span], start_ns: int, group: str = "pp") -> list[Span]:
    """The same spans later, in a group."""
    return [s._replace(start_ns=s.start_ns + start_ns, end_ns=s.end_ns + start_ns, group=group) for s in spans]


@given(st.integers(1, 5), st.integers(1, 9))
def test_gpipe_bubble_matches_the_formula(num_ranks: int, num_microbatches: int) -> None:
    spans = play(gpipe(num_ranks, num_microbatches), LENGTHS)
    assert bubble_fraction(spans) == pytest.approx((num_ranks - 1) / (num_microbatches + num_ranks - 1), abs=1e-9)


def test_split_backward_waits_only_for_its_inputs() -> None:
    orders = [[("F", 0, 0), ("I", 0, 0), ("W", 0, 0)], [("F", 1, 0), ("I", 1, 0), ("W", 1, 0)]]
    ends = {(span.rank, span.name): span.end_ns for span in play(orders, LENGTHS)}
    assert ends[1, "I"] == ends[1, "F"] + 10_000_000
    assert ends[0, "I"] == ends[1, "I"] + 10_000_000


def test_orders_that_deadlock_are_rejected() -> None:
    with pytest.raises(ValueError, match="deadlock"):
        play([[("B", 0, 0), ("F", 0, 0)]], LENGTHS)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 3), st.randoms(use_true_random=False))
def test_last_complete_step_is_found_in_any_order(
    num_ranks: int, num_microbatches: int, cut: int, shuffle: random.Random
) -> None:
    step = play(gpipe(num_ranks, num_microbatches), LENGTHS)
    length = max(span.end_ns for span in step)
    spans = [*shifted(step, 0), *shifted(step, 2 * length)]
    if cut:  # a third one, which some ranks have not reported in full yet
        spans += shifted(step, 4 * length)[:-cut]
    shuffle.shuffle(spans)
    (found,) = last_steps(spans)
    assert sorted(found.measured) == sorted(shifted(step, 2 * length))
    assert [span[:5] for span in found.ideal] == [span[:5] for span in step]
    assert found.bubble == pytest.approx(found.ideal_bubble)


def test_parallel_pipelines_are_distinguished() -> None:
    step = play(gpipe(2, 3), LENGTHS)
    moved = [span._replace(rank=span.rank + 2) for span in step]
    found = last_steps([*shifted(step, 5, "a"), *shifted(moved, 9, "b"), Span(0, "forward", "Model", 0, 9)])
    assert [(one.group, sorted({span.rank for span in one.measured})) for one in found] == [
        ("b", [2, 3]),
        ("a", [0, 1]),
    ]


def test_slow_stage_increases_the_measured_bubble() -> None:
    step = play(gpipe(3, 6), LENGTHS)
    slow = [span._replace(start_ns=3 * span.start_ns, end_ns=3 * span.start_ns + 10_000_000) for span in step]
    (found,) = last_steps(shifted(slow, 0))
    assert found.bubble > found.ideal_bubble > 0


def test_forward_only_and_partial_steps_do_not_count() -> None:
    step = play(gpipe(2, 3), LENGTHS)
    assert last_steps(shifted([span for span in step if span.kind == "forward"], 0)) == []
    assert last_steps(shifted([span for span in step if span.rank == 1], 0)) == []
    assert last_steps(itertools.chain()) == []


def test_stages_that_differ_and_messages_that_take_time() -> None:
    orders = [[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0), ("B", 1, 0)]]
    lengths = {"F": (0.01, 0.03), "B": (0.02, 0.04)}
    first, second = simulate_orders(orders, lengths, num_stages=2, num_microbatches=1, latency_s=(0.005,))
    assert second == [pytest.approx((0.015, 0.045)), pytest.approx((0.045, 0.085))]
    assert first == [pytest.approx((0.0, 0.01)), pytest.approx((0.09, 0.11))]
    one_rank = [[*orders[0][:1], *orders[1], *orders[0][1:]]]
    (times,) = simulate_orders(one_rank, lengths, num_stages=2, num_microbatches=1, latency_s=(0.005,))
    assert times[-1][1] == pytest.approx(0.1), "a rank sends itself no messages"


@pytest.mark.parametrize(
    "orders",
    [
        [[("F", 1, 0)]],
        [[("F", 0, 0), ("W", 0, 0)]],
        [[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0)]],
    ],
)
def test_waiting_for_a_missing_action_is_an_error(orders: list[list[Action]]) -> None:
    with pytest.raises(ValueError, match="deadlock, or depend on an action that is in none of them"):
        play(orders, LENGTHS)
