"""Advice on recorded steps: the replay repeats what was measured, and each cause is named with what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from axon_nb.records.performance.advice import Advice, advise
from axon_nb.records.performance.replay import Recording
from axon_nb.records.performance.steps import record_steps
from axon_nb.records.spans import Span
from axon_nb.records.training.pipeline import PipelineStep
from tests.support.records.straggling import MS, span_of, straggling_spans

GROUPS = {"0": (0, 1)}
Part = Callable[["Steps", int], None]


class Steps:
    """Spans of two ranks in step: what each part of a step adds, in milliseconds."""

    def __init__(self, *parts: Part, num_steps: int = 5) -> None:
        self.now = [0.0, 0.0]
        self.spans: list[Span] = []
        self.sequence = 0
        for step in range(num_steps):
            for part in parts:
                part(self, step)
            self.run("optimizer", 1.0)

    def run(self, kind: str, length: float, rank: int | None = None) -> None:
        """Run something on one or both ranks."""
        for one in (0, 1) if rank is None else (rank,):
            self.spans.append(span_of(one, kind, kind, self.now[one], self.now[one] + length))
            self.now[one] += length

    def rest(self, length: float, rank: int | None = None) -> None:
        """Run code of the ranks' own."""
        for one in (0, 1) if rank is None else (rank,):
            self.now[one] += length

    def call(self, name: str, length: float, size: int, within: str = "") -> None:
        """Wait for a collective, perhaps inside of something."""
        self.sequence += 1
        end = max(self.now) + length
        more = {"group": "0", "sequence": self.sequence}
        for rank, start in enumerate(self.now):
            self.spans.append(span_of(rank, "collective", name, start, end, bytes=size, **more))
            self.spans.append(span_of(rank, "wait", name, start, end, **more))
            if within:
                self.within(rank, within, start, end)
        self.now = [end, end]

    def within(self, rank: int, kind: str, start: float, end: float) -> None:
        """Let the rank's last span of this kind go on; it starts here if it is over."""
        for place, span in enumerate(self.spans):
            if (span.rank, span.kind, span.end_ns) == (rank, kind, round(start * MS)):
                self.spans[place] = span._replace(end_ns=round(end * MS))
                return
        self.spans.append(span_of(rank, kind, kind, start, end))

    def recording(self) -> Recording:
        """The steps as they are read."""
        recording = record_steps(self.spans, GROUPS)
        assert recording is not None
        return recording


def compute(steps: Steps, _: int) -> None:
    steps.run("forward", 10.0)
    steps.run("backward", 20.0)


def reduce(steps: Steps, _: int) -> None:
    steps.call("all_reduce", 1.0, 4 << 20, "backward")


def best(*parts: Part) -> Advice:
    return advise(Steps(*parts).recording())[0]


def test_replay_repeats_the_measured_step() -> None:
    for spans, groups in (
        (straggling_spans(4), {"0": (0, 1, 2, 3)}),
        (Steps(compute, reduce, lambda s, n: s.rest(5.0 + n, n % 2)).spans, GROUPS),
    ):
        recording = record_steps(spans, groups)
        assert recording is not None
        assert recording.replay() == pytest.approx(recording.measured_s, rel=1e-6)


def test_balanced_program_gets_no_advice() -> None:
    assert advise(Steps(compute, reduce).recording()) == []


def test_fewer_than_two_steps_are_no_recording() -> None:
    assert record_steps(Steps(compute, num_steps=1).spans, GROUPS) is None
    assert record_steps([], GROUPS) is None


def slow_loader(steps: Steps, _: int) -> None:
    steps.run("data", 15.0)


def late_data(steps: Steps, _: int) -> None:
    steps.run("data", 15.0, rank=1)


def late_code(steps: Steps, _: int) -> None:
    steps.rest(15.0, rank=1)


def late_compute(steps: Steps, _: int) -> None:
    steps.run("forward", 15.0, rank=1)


def collection(steps: Steps, _: int) -> None:
    steps.run("gc", 15.0)


def three_backwards(steps: Steps, step: int) -> None:
    for _ in range(3):
        compute(steps, step)
        steps.call("all_reduce", 15.0, 4 << 20, "backward")


def many_small(steps: Steps, _: int) -> None:
    for _ in range(20):
        steps.call("all_reduce", 2.0, 4000, "backward")


def after_backward(steps: Steps, _: int) -> None:
    for _ in range(4):
        steps.call("all_reduce", 4.0, 2 << 20)


def gathered_twice(steps: Steps, _: int) -> None:
    steps.call("all_gather_single", 10.0, 4 << 20, "forward")
    steps.run("backward", 20.0)
    steps.call("all_gather_single", 10.0, 4 << 20, "backward")


def long_sums(steps: Steps, _: int) -> None:
    steps.call("all_reduce", 30.0, 64 << 20, "backward")


@pytest.mark.parametrize(
    ("parts", "cause", "gain"),
    [
        ((slow_loader, compute, reduce), "data loading", 15 / 47),
        ((late_data, compute, reduce), "straggler: data", 15 / 47),
        ((late_code, compute, reduce), "straggler: own code", 15 / 47),
        ((late_compute, compute, reduce), "straggler: forward", 15 / 47),
        ((collection, compute, reduce), "garbage collection", 15 / 47),
        ((three_backwards,), "no_sync", 30 / 136),
        ((compute, many_small), "small buckets", 38 / 71),
        ((compute, gathered_twice), "resharding", 10 / 71),
        ((compute, long_sums), "communication", 15 / 61),
    ],
)
def test_cause_is_named_first_with_what_it_costs(parts: Sequence[Part], cause: str, gain: float) -> None:
    first = best(*parts)
    assert first.cause == cause
    assert first.gain == pytest.approx(gain, abs=0.02)
    assert f"A step takes {first.gain:.0%} less then." in str(first)


def test_sums_after_the_backward_are_hidden_as_far_as_ddp_would() -> None:
    # A bucket of the last layer after a quarter of the backward, and the rest at its end.
    first = best(compute, after_backward)
    assert first.cause == "exposed communication"
    assert first.gain == pytest.approx(4 / 47, abs=0.02)


def test_rank_that_is_late_now_and_then_is_no_straggler() -> None:
    recording = Steps(compute, reduce, lambda steps, step: steps.rest(15.0, step % 2)).recording()
    assert not any(advice.cause.startswith("straggler") for advice in advise(recording))


def test_pipeline_is_advised_to_balance_its_stages_or_to_split_its_batch() -> None:
    recording = Steps(compute).recording()
    measured = tuple(
        span_of(stage, "forward", "F", start, start + length, stage=stage, microbatch=microbatch)
        for stage, length in ((0, 3.0), (1, 6.0))
        for microbatch, start in ((0, 3.0 * stage), (1, 3.0 * stage + length))
    )
    ideal = tuple(
        span_of(stage, "forward", "F", start, start + 4.0, stage=stage, microbatch=microbatch)
        for stage in (0, 1)
        for microbatch, start in ((0, 4.0 * stage), (1, 4.0 * stage + 4.0))
    )
    uneven, bubble = advise(recording, [PipelineStep("0", measured, ideal)])
    assert (uneven.cause, bubble.cause) == ("uneven stages", "bubble")
    assert uneven.gain == pytest.approx(15 / 31 * (1 - 12 / 15))
    assert bubble.gain == pytest.approx(12 / 31 * (1 / 3) / 2)
    assert "stage 1 computes 12 ms per step, the others 6 ms" in uneven.claim
    assert "4 microbatches instead of 2" in bubble.change
