"""Planned schedules: published formulas, and invariants for any stages and latencies."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from axon_nb import plan
from axon_nb.errors import UsageError
from axon_nb.parallel import PipelineMemoryStats, bubble_fraction, ideal_timeline
from axon_nb.parallel.pipeline.schedule import PipelineSchedule, stages_of_rank

ALL = [schedule.value for schedule in PipelineSchedule]
SECONDS = st.floats(0.001, 0.1)


def per_rank(name: str) -> int:
    """Stages per rank by default."""
    return 2 if PipelineSchedule.of(name).has_many_stages else 1


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_bubble_of_gpipe_and_1f1b(name: str, ranks: int) -> None:
    """(K - 1) / (M + K - 1): Huang et al., GPipe, 2019, section 2.3; 1F1B: Narayanan et al., 2021, section 2.2.1."""
    for num_microbatches in (ranks, ranks + 3, 4 * ranks):
        found = plan.schedule(name, ranks, num_microbatches, (0.013, 0.021))
        assert found.bubble == pytest.approx((ranks - 1) / (num_microbatches + ranks - 1))


@pytest.mark.parametrize(("ranks", "a_rank"), [(2, 2), (2, 3), (4, 2), (4, 4), (8, 2)])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS"])
def test_bubble_of_interleaved_schedules(name: str, ranks: int, a_rank: int) -> None:
    """(p - 1) / m / v of the ideal time: Narayanan et al., 2021, section 2.2.2; breadth first: Lamy-Poirier, 2022."""
    for num_microbatches in (ranks, 2 * ranks, 5 * ranks):
        found = plan.schedule(name, ranks * a_rank, num_microbatches, (0.01, 0.025), num_ranks=ranks)
        idle_by_ideal = (ranks - 1) / num_microbatches / a_rank
        assert found.bubble / (1 - found.bubble) == pytest.approx(idle_by_ideal)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bubble_of_zero_bubble_1p(ranks: int) -> None:
    """(p - 1) (F + B - W) of idle time, with F = B = W: Qi et al., Zero Bubble, 2023, table 2 (ZB-H1)."""
    for num_microbatches in (2 * ranks, 4 * ranks):
        found = plan.schedule("InterleavedZeroBubble", 2 * ranks, num_microbatches, (0.01, 0.02, 0.01))
        idle = found.bubble * found.step_s
        assert idle == pytest.approx((ranks - 1) * 0.01)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zbv_is_never_idle_between_first_and_last_action(ranks: int) -> None:
    """No bubble with F = B = W and twice as many microbatches as ranks, but for the ramps at both ends.

    Qi et al., Pipeline Parallelism with Controllable Memory, 2024, section 3 (V-ZB).
    """
    found = plan.schedule("ZBVZeroBubble", 2 * ranks, 2 * ranks, (0.01, 0.02, 0.01))
    for rank, moments in enumerate(found.moments):
        assert moments[-1][1] - moments[0][0] == pytest.approx(found.busy_s[rank])


@pytest.mark.parametrize("name", ALL)
def test_formula_matches_the_simulation(name: str) -> None:
    for ranks, times in itertools.product((2, 4), (2, 4, 8)):
        found = plan.schedule(name, ranks * per_rank(name), ranks * times, (0.01, 0.02, 0.01))
        if found.formula is not None:
            assert found.formula.fraction == pytest.approx(found.bubble)
            assert found.formula.source in str(found)
    uneven = plan.schedule(name, 4, 8, [(0.01, 0.02)] * 3 + [(0.02, 0.02)])
    assert uneven.formula is None
    assert plan.schedule(name, 4, 8, latency_s=0.001).formula is None


@pytest.mark.parametrize("name", ALL)
def test_peaks_match_the_pipeline(name: str) -> None:
    """1F1B keeps P - r on rank r, GPipe all M: Narayanan et al., 2021, section 2.2.1."""
    found = plan.schedule(name, 8, 12)
    stats = PipelineMemoryStats.of(name, num_ranks=8 // per_rank(name), num_stages=8, num_microbatches=12)
    assert found.peak_per_rank == stats.peak_per_rank
    assert found.peak_per_stage == stats.peak_per_stage
    assert found.peak_live == stats.peak_activations
    if name == "1F1B":
        assert found.peak_per_rank == tuple(range(8, 0, -1))
    if name == "GPipe":
        assert found.peak_per_rank == (12,) * 8


@pytest.mark.parametrize("name", ALL)
def test_timeline_is_the_ideal_one_for_equal_stages(name: str) -> None:
    found = plan.schedule(name, 8, 8, (0.01, 0.02))
    ideal = ideal_timeline(name, num_ranks=found.num_ranks, num_stages=8, num_microbatches=8)
    assert list(found.timeline) == ideal
    assert bubble_fraction(found.timeline) == pytest.approx(found.bubble)


@pytest.mark.parametrize("name", [name for name in ALL if per_rank(name) == 2])
def test_orders_match_torch(name: str) -> None:
    """Orders are read from torch's classes without their message actions."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    for ranks, num_microbatches in ((2, 4), (4, 8), (4, 12)):
        reported = get_schedule_ops(name, ranks, num_microbatches)
        found = plan.schedule(name, 2 * ranks, num_microbatches)
        for order, theirs in zip(found.orders, reported, strict=True):
            parts = [part for action in theirs if action is not None for part in (action.sub_actions or (action,))]
            kinds = [(part.computation_type.value, part.stage_index, part.microbatch_index) for part in parts]
            assert list(order) == [kind for kind in kinds if kind[0] in ("F", "B", "I", "W")]


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """A schedule with uneven stages and latencies."""
    name = draw(st.sampled_from(ALL))
    ranks = draw(st.integers(1, 4))
    stages = ranks * per_rank(name)
    num_microbatches = stages * draw(st.integers(1, 3))
    times = draw(st.lists(st.tuples(SECONDS, SECONDS), min_size=stages, max_size=stages))
    latency = draw(st.lists(st.floats(0, 0.02), min_size=stages - 1, max_size=stages - 1))
    return {
        "name": name,
        "num_stages": stages,
        "num_microbatches": num_microbatches,
        "times": times,
        "latency_s": latency,
    }


@given(cases())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_invariants_of_any_schedule(case: dict[str, Any]) -> None:
    found = plan.schedule(**case)
    stages, count = case["num_stages"], case["num_microbatches"]
    ends: dict[tuple[str, int, int], float] = {}
    begins: dict[tuple[str, int, int], float] = {}
    owner = {}
    for rank, order in enumerate(found.orders):
        moments = found.moments[rank]
        assert found.stages_of(rank) == tuple(
            stages_of_rank(found.schedule, rank, num_ranks=found.num_ranks, num_stages=stages)
        )
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(moments)), "one action at a time"
        for (action, stage, microbatch), (begin, end) in zip(order, moments, strict=True):
            begins[action, stage, microbatch], ends[action, stage, microbatch] = begin, end
            owner[stage] = rank
    for stage, microbatch in itertools.product(range(stages), range(count)):
        whole = ("B", stage, microbatch) in ends
        assert whole or {("I", stage, microbatch), ("W", stage, microbatch)} <= ends.keys()
        back = ("B" if whole else "I", stage, microbatch)
        assert begins[back] >= ends["F", stage, microbatch]
        if not whole:
            assert begins["W", stage, microbatch] >= ends[back]
        if stage:
            delay = case["latency_s"][stage - 1] if owner[stage] != owner[stage - 1] else 0.0
            assert begins["F", stage, microbatch] >= ends["F", stage - 1, microbatch] + delay - 1e-12
            before = "B" if ("B", stage - 1, microbatch) in ends else "I"
            assert begins[before, stage - 1, microbatch] >= ends[back] + delay - 1e-12
    busiest = max(found.busy_s)
    assert found.step_s >= busiest - 1e-12
    work = sum(forward + backward for forward, backward in case["times"]) * count
    assert sum(found.busy_s) == pytest.approx(work)
    assert found.bubble == pytest.approx(1 - work / (found.num_ranks * found.step_s))


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=6), st.integers(1, 8), st.floats(0, 0.01))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_gpipe_is_two_flow_shops(times: list[tuple[float, float]], num_microbatches: int, latency: float) -> None:
    """Equal jobs through machines in a row take the sum of one job's times and M - 1 times the longest.

    Conway, Maxwell and Miller, Theory of Scheduling, 1967, chapter 5; once forward, once back, with latencies.
    """
    found = plan.schedule("GPipe", len(times), num_microbatches, times, latency_s=latency)
    forward, backward = zip(*times, strict=True)
    expected = sum(forward) + sum(backward) + (num_microbatches - 1) * (max(forward) + max(backward))
    assert found.step_s == pytest.approx(expected + 2 * (len(times) - 1) * latency)


@given(st.sampled_from(ALL), st.floats(0, 0.01), st.floats(0, 0.01))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_longer_messages_never_help(name: str, first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert plan.schedule(name, 4, 8, latency_s=low).step_s <= plan.schedule(name, 4, 8, latency_s=high).step_s + 1e-12


def test_largest_benchmarked_schedule() -> None:
    for name in ALL:
        found = plan.schedule(name, 16, 64)
        assert len(found.timeline) == sum(map(len, found.orders))
        assert 0 < found.bubble < 0.25


def test_frame_figure_and_texts() -> None:
    found = plan.schedule("ZBVZeroBubble", 8, 8, latency_s=0.001)
    frame = found.to_frame()
    assert list(frame.columns) == ["rank", "stage", "microbatch", "action", "start_ms", "end_ms"]
    assert frame["end_ms"].max() == pytest.approx(1e3 * found.step_s)
    assert set(frame["action"]) == {"F", "B", "I", "W"} & set(frame["action"])
    figure = found.figure()
    assert sum(len(trace.x) for trace in figure.data) == len(frame)
    assert "ms" in figure.layout.xaxis.title.text
    html = found._repr_mimebundle_()["text/html"]
    assert html.count("<rect") == len(frame) + frame["action"].nunique()
    assert "ms per step" in str(found)
    assert str(found).count("\n") == 1 + found.num_ranks
    assert found.summary()["step_ms"] == pytest.approx(1e3 * found.step_s)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"name": "nothing"}, "schedule must be one of 'GPipe'"),
        ({"num_stages": 0}, "num_stages must be a whole number, 1 or more; got 0"),
        ({"num_microbatches": 1.5}, "num_microbatches must be a whole number, 1 or more; got 1.5"),
        ({"num_microbatches": 2}, "at least as many microbatches as stages"),
        ({"name": "Interleaved1F1B", "num_stages": 5}, "num_stages must be even"),
        ({"name": "ZBVZeroBubble", "num_stages": 8, "num_ranks": 2}, "needs two stages per rank"),
        ({"times": [(0.1, 0.1)] * 3}, "one for each of 4; got 3"),
        ({"times": 0.1}, r"\(forward, backward\) in seconds"),
        ({"times": (0.1, 0.1, 0.2)}, "the weights' part at most the backward"),
        ({"times": (0.1, -0.1)}, "must be 0 or more"),
        ({"times": [(0.1,)] * 4}, "A stage's time must be"),
        ({"latency_s": [0.1]}, "3 boundaries between 4 stages; got 1"),
        ({"latency_s": -1.0}, "seconds, 0 or more"),
        ({"latency_s": math.nan}, "seconds, 0 or more"),
    ],
)
def test_bad_arguments_get_one_sentence(call: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan.schedule(**({"name": "1F1B", "num_stages": 4, "num_microbatches": 8} | call))


def test_messages_of_backward_may_take_another_time() -> None:
    """GPipe on two ranks with one microbatch: forward, message, forward, backward, message, backward."""
    found = plan.schedule("GPipe", 2, 1, (0.01, 0.02), latency_s=0.003, backward_latency_s=0.005)
    assert found.step_s == pytest.approx(2 * 0.01 + 2 * 0.02 + 0.003 + 0.005)
    assert found.formula is None
    with pytest.raises(UsageError, match="one for each of the 1 boundaries"):
        plan.schedule("GPipe", 2, 1, backward_latency_s=[0.0, 0.0])
