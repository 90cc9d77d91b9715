"""Pipeline steps: simulated without waiting, found among spans, and the last one of each pipeline."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

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


def one_f_one_b(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Rank r runs num_ranks - r forwards ahead."""
    orders = []
    for rank in range(num_ranks):
        ahead = min(num_microbatches, num_ranks - rank)
        order = [("F", rank, number) for number in range(ahead)]
        for number in range(num_microbatches):
            order.append(("B", rank, number))
            if ahead + number < num_microbatches:
                order.append(("F", rank, ahead + number))
        orders.append(order)
    return orders


class Session:
    """Pipelines that ran one after another on the same ranks, as their rings tell of them."""

    def __init__(self) -> None:
        self.now = 1_000
        self.spans: list[Span] = []

    def step(self, ranks: Iterable[int], num_microbatches: int, group: str, *, broken_at: int = 0) -> list[Span]:
        """One more step; with `broken_at` all ranks stop at that action of theirs."""
        ranks = list(ranks)
        found = play(one_f_one_b(len(ranks), num_microbatches), LENGTHS, ranks=ranks)
        length, began = max(span.end_ns for span in found), self.now
        self.now += length + 1_000_000
        step = [
            own._replace(start_ns=own.start_ns + began, end_ns=own.end_ns + began, group=group, sequence=began + rank)
            for rank in ranks
            for own in [span for span in found if span.rank == rank][: broken_at or None]
        ]
        self.spans += step
        return step


def test_losing_the_oldest_spans_keeps_later_steps() -> None:
    session = Session()
    for _ in range(5):
        last = session.step(range(4), 8, "0")
    for rank in range(4):
        own = [span for span in session.spans if span.rank == rank]
        for span in own[: 3 + rank]:
            session.spans.remove(span)
    (found,) = last_steps(session.spans, members={"0": range(4)})
    assert sorted(found.measured) == sorted(last)


def test_dead_ranks_are_not_waited_for() -> None:
    session = Session()
    session.step(range(4), 4, "0")
    last = session.step(range(2), 4, "0")
    (found,) = last_steps(session.spans, members={"0": range(2)})
    assert sorted(found.measured) == sorted(last)


def test_step_missing_on_a_rank_is_incomplete() -> None:
    session = Session()
    whole = session.step(range(4), 4, "0")
    late = session.step(range(4), 4, "0")
    reported = [span for span in session.spans if not (span in late and span.rank == 3)]
    (found,) = last_steps(reported, members={"0": range(4)})
    assert sorted(found.measured) == sorted(whole)
    assert last_steps([span for span in late if span.rank < 3], members={"0": range(4)}) == []


def test_evaluations_do_not_hide_the_last_training_step() -> None:
    session = Session()
    trained = session.step(range(2), 4, "0")
    for _ in range(20):
        session.step(range(2), 4, "0")
    spans = [span for span in session.spans if span.kind == "forward" or span in trained]
    (found,) = last_steps(spans, members={"0": [0, 1]})
    assert sorted(found.measured) == sorted(trained)


sizes = st.tuples(st.sampled_from(("0", "1", "2")), st.integers(1, 6), st.integers(0, 7))
"""Group, microbatches, and where the step was aborted (0 if it was not)."""
GROUPS = {"0": (0, 1, 2, 3), "1": (0, 1), "2": (2, 3)}


@given(st.lists(sizes, max_size=8), st.integers(0, 40), st.randoms(use_true_random=False))
def test_last_complete_step_of_each_pipeline_is_found(
    steps: list[tuple[str, int, int]], gone: int, shuffle: random.Random
) -> None:
    session = Session()
    begun = [(group, session.step(GROUPS[group], count, group, broken_at=at), count) for group, count, at in steps]
    spans = session.spans[gone:]  # the oldest were dropped, within steps
    kept = set(spans)
    wanted = {
        group: step
        for group, step, count in begun
        if len(step) == 2 * count * len(GROUPS[group]) and kept.issuperset(step)
    }
    shuffle.shuffle(spans)
    found = last_steps(spans, members=GROUPS)
    assert {step.group: sorted(step.measured) for step in found} == {g: sorted(step) for g, step in wanted.items()}
    ends = [max(span.end_ns for span in step.measured) for step in found]
    assert ends == sorted(ends, reverse=True)
