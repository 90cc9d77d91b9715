"""Pipelines equal one process for every schedule: losses, gradients, weights; and recorded spans."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from axon_nb.parallel import PipelineMemoryStats
from axon_nb.parallel.pipeline.schedule import PipelineSchedule, stages_of_rank
from tests.parallel.conftest import make
from tests.parallel.pipeline.pipelines import CASES, Trained, in_one_process, merged, train

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
