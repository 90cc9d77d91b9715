"""The last step of each pipeline among many spans: repeated, aborted, truncated, or with dead ranks."""

from __future__ import annotations

import random
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from axon_nb.records.spans import Span
from axon_nb.records.training.steps import Action, last_steps, play

LENGTHS = {"F": 0.01, "B": 0.02, "I": 0.01, "W": 0.01}


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
