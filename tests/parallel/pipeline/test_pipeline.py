"""Pipelines equal one process for every schedule, their spans, and models split into stages of equal cost."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from axon_nb.comm import World
from axon_nb.parallel import Pipeline, PipelineMemoryStats
from axon_nb.parallel.pipeline.schedule import PipelineSchedule, stages_of_rank
from axon_nb.parallel.pipeline.stages import balance, child_costs
from tests.parallel.conftest import make
from tests.parallel.pipeline.pipelines import CASES, Trained, batches, in_one_process, merged, train
from tests.support.training.models import loss_of

STEPS = 3


@pytest.fixture(scope="module")
def trained(process_worlds: Any) -> Any:
    """Training results by case; each computed once."""
    done: dict[Any, list[Trained]] = {}

    def get(kind: str, case: tuple[str, int, int, int], dtype: torch.dtype = torch.float64) -> list[Trained]:
        schedule, ranks, stages, microbatches = case
        if (kind, case, dtype) not in done:
            world = make(f"{kind}-{ranks}", process_worlds)
            done[kind, case, dtype] = world.run(train, schedule, stages, microbatches, steps=STEPS, dtype=dtype)
        return done[kind, case, dtype]

    return get


def _assert_same(ranks: list[Trained], expected: Trained, rtol: float) -> None:
    for rank in ranks:
        assert rank.losses == pytest.approx(expected.losses, rel=rtol)
    for what in ("gradients", "weights"):
        found, wanted = merged([getattr(rank, what) for rank in ranks]), getattr(expected, what)
        assert set(found) == set(wanted), "names are those of the whole model"
        for name, value in found.items():
            error = (value - wanted[name]).norm() / wanted[name].norm()
            assert error <= rtol, f"{what} of {name}: relative error {error:.1e}"
    (output,) = [rank.output for rank in ranks if rank.output is not None]
    assert (output - expected.output).norm() / expected.output.norm() <= rtol  # type: ignore[operator,union-attr]


@pytest.mark.parametrize("kind", ["mock", "gloo"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pipeline_trains_as_one_process(trained: Any, kind: str, case: tuple[str, int, int, int]) -> None:
    _assert_same(trained(kind, case), in_one_process(STEPS, 2 * case[3]), 1e-10)


@pytest.mark.parametrize("case", [case for case in CASES if case[1] == 4], ids=str)
def test_in_single_precision(trained: Any, case: tuple[str, int, int, int]) -> None:
    expected = in_one_process(STEPS, 2 * case[3], torch.float32)
    _assert_same(trained("gloo", case, torch.float32), expected, 5e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_action_is_recorded(trained: Any, case: tuple[str, int, int, int]) -> None:
    schedule, ranks, stages, microbatches = case
    for rank, reported in enumerate(trained("gloo", case)):
        found = Counter((span.name, span.stage, span.microbatch) for span in reported.spans)
        own = stages_of_rank(PipelineSchedule.of(schedule), rank, num_ranks=ranks, num_stages=stages)
        assert max(found.values()) == 1
        for stage in own:
            done = {name: {m for n, s, m in found if (n, s) == (name, stage)} for name, _, _ in found}
            every = set(range(microbatches))
            assert done["F"] == every
            assert done.get("B", set()) | done.get("W", set()) == every
            assert done.get("I", set()) == done.get("W", set())
            from_before, to_next = stage > 0 and stage - 1 not in own, stage < stages - 1 and stage + 1 not in own
            for name, happens in (
                ("RECV_F", from_before),
                ("SEND_B", from_before),
                ("SEND_F", to_next),
                ("RECV_B", to_next),
            ):
                assert done.get(name, set()) == (every if happens else set()), (name, stage)
        messages = [span for span in reported.spans if span.kind == "p2p"]
        assert {span.bytes for span in messages} == {2 * 8 * 8}, "two samples of 8 numbers of 8 bytes"
        assert all(span.rank == rank and span.group and span.end_ns >= span.start_ns for span in reported.spans)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_live_microbatches_match_the_formula(trained: Any, case: tuple[str, int, int, int]) -> None:
    schedule, ranks, stages, microbatches = case
    stats = PipelineMemoryStats.of(schedule, num_ranks=ranks, num_stages=stages, num_microbatches=microbatches)
    peaks = merged([reported.peaks for reported in trained("gloo", case)])
    assert tuple(peaks[stage] for stage in range(stages)) == stats.peak_per_stage


class Scaled(nn.Linear):
    """A layer whose output can be scaled."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) * scale


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_batches_that_are_split_already(two: Any, schedule: str) -> None:
    ((x, y),) = batches(1, 12)

    def work(world: World) -> Any:
        torch.manual_seed(0)
        stages = [Scaled(8, 8, dtype=torch.float64) for _ in range(2 if schedule in ("GPipe", "1F1B") else 4)]
        pipe = Pipeline(stages, group=world, num_microbatches=4, schedule=schedule, loss=loss_of)

        def step(*args: Any, **options: Any) -> list[torch.Tensor]:
            pipe.zero_grad()
            losses = pipe.step(*args, **options)
            found = [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]
            return [*found, *([] if losses is None else [losses])]

        parts = {"arg_mbs": list(x.chunk(4)), "target_mbs": list(y.chunk(4))}
        step(x, y)
        runner = pipe._runner
        every = [
            step(x, y),
            step(**parts),
            step(x, target_mbs=parts["target_mbs"]),
            step(None, y, arg_mbs=[(part,) for part in parts["arg_mbs"]]),
        ]
        assert pipe._runner is runner, "the stages were not made again"
        scales = [{"scale": 0.5}, {}, {"scale": -1.0}, {"scale": 2.0}]
        return every, step(**parts, kwarg_mbs=scales), len(pipe.stage_indices)

    for every, scaled, held in two.run(work):
        for found in every[1:]:
            assert all(map(torch.equal, every[0], found))
            assert len(found) >= 2 * held
        assert not any(map(torch.equal, every[0], scaled))


def test_keyword_arguments_of_each_microbatch(two: Any) -> None:
    def work(world: World) -> Any:
        torch.manual_seed(3)
        stages = [Scaled(8, 8, dtype=torch.float64) for _ in range(2)]
        ((x, y),) = batches(1, 8)
        model = nn.Sequential(*stages)
        scales = [[0.5, 1.0, -1.0, 2.0], [3.0, 0.25, 1.0, 1.0]]
        for number, (part, wanted) in enumerate(zip(x.chunk(4), y.chunk(4), strict=True)):
            output = stages[1](stages[0](part, scales[0][number]), scales[1][number])
            (loss_of(output, wanted) / 4).backward()
        expected = [parameter.grad.clone() for parameter in model[world.rank()].parameters()]
        model.zero_grad()
        pipe = Pipeline(stages, group=world, num_microbatches=4, loss=loss_of)
        pipe.step(x, y, kwarg_mbs=[{"scale": scale} for scale in scales[world.rank()]])
        return expected, [parameter.grad for parameter in pipe.parameters()]

    for expected, found in two.run(work):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), parts=st.integers(1, 5))
def test_most_expensive_part_is_minimal(costs: list[int], parts: int) -> None:
    if parts > len(costs):
        return

    def worth(starts: tuple[int, ...]) -> tuple[int, int]:
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise((*starts, len(costs)))]
        return max(sums), sum(value * value for value in sums)

    found = balance([float(cost) for cost in costs], parts)
    assert found[0] == 0
    assert len(found) == parts
    assert found == sorted(set(found))
    every = [(0, *rest) for rest in itertools.combinations(range(1, len(costs)), parts - 1)]
    assert worth(tuple(found)) == min(map(worth, every))


class Busy(nn.Module):
    """Computes a number of matrix products."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.weight = nn.Parameter(torch.eye(64))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(self.rounds):
            x = x @ self.weight
        return x


def test_cost_by_measured_time() -> None:
    model = nn.Sequential(*(Busy(rounds) for rounds in (1, 1, 400, 1)))
    random_state = torch.get_rng_state()
    costs = list(child_costs(model, "time", torch.randn(256, 64)).values())
    assert costs[2] > 3 * max(costs[0], costs[1], costs[3])
    assert all(block.calls == 0 for block in model), "buffers are as before"
    assert all(block.weight.grad is None for block in model)
    assert not torch.equal(torch.get_rng_state(), random_state), "only the sample was drawn"
    assert balance(costs, 3) in ([0, 2, 3], [0, 1, 2])


def test_all_ranks_split_at_the_same_places(two: Any) -> None:
    def work(world: World) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*(Busy(1 + 400 * (number == 5)) for number in range(6)))
        x = torch.randn(64, 64)
        pipes = [
            Pipeline.split(model, group=world, split="time", sample=x),
            Pipeline.split(model, group=world, split=lambda block: float(block.rounds)),
            Pipeline.split(model, group=world),
            Pipeline.split(model, group=world, at=["1"]),
        ]
        return [sorted({name.partition(".")[0] for name, _ in pipe.named_parameters()}) for pipe in pipes]

    first, second = two.run(work)
    by_hand = [(list("01234"), list("5")), (list("012"), list("345")), (list("0"), list("12345"))]
    assert list(zip(first[1:], second[1:], strict=True)) == by_hand
    assert sorted(first[0] + second[0]) == list("012345")
