"""Live microbatches: closed forms against what autograd keeps; the ideal timeline and its bubble."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed import pipelining

from axon_nb.comm import World
from axon_nb.errors import UsageError
from axon_nb.parallel import Pipeline, PipelineMemoryStats, PipelineSchedule, bubble_fraction, ideal_timeline
from axon_nb.parallel.pipeline import pipeline
from axon_nb.parallel.pipeline.schedule import actions, is_prepared
from axon_nb.records import spans as trace
from tests.parallel.conftest import make
from tests.parallel.pipeline.pipelines import CASES, batches, whole
from tests.support.training.models import loss_of

LOOPED = ("Interleaved1F1B", "LoopedBFS")


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_torch_reports_whether_shapes_are_negotiated(schedule: str) -> None:
    def work(world: World) -> Any:
        pipe = Pipeline.split(whole(), group=world, schedule=schedule, num_microbatches=4, loss=loss_of)
        made: Any = pipe._make_runner()._schedule
        before = [is_prepared(made, otherwise) for otherwise in (True, False)]
        pipe.step(*batches(1, 8)[0])
        used: Any = pipe._runner
        return before, [is_prepared(used._schedule, otherwise) for otherwise in (True, False)]

    assert World.mock(2).run(work) == [([False, False], [True, True])] * 2
    assert is_prepared(object(), True)


@pytest.mark.skipif(not hasattr(pipelining, "analyze_pipeline_activation_liveness"), reason="torch before 2.15")
@pytest.mark.parametrize("schedule", [*LOOPED, "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_peaks_are_those_of_torchs_own_analysis(schedule: str) -> None:
    def work(world: World) -> Any:
        pipe = Pipeline.split(whole(), group=world, schedule=schedule, num_microbatches=8, loss=loss_of)
        analyze: Any = getattr(pipelining, "analyze_pipeline_activation_liveness")  # noqa: B009 - torch 2.15
        made: Any = pipe._make_runner()._schedule
        options = {"stage_indices": sorted(pipe._stage_modules), "granularity": "stage_microbatch"}
        return analyze(made, pp_rank=world.rank(), **options).num_slots

    stats = PipelineMemoryStats.of(schedule, num_ranks=2, num_microbatches=8)
    assert tuple(World.mock(2).run(work)) == stats.peak_per_rank


@pytest.mark.parametrize("hooks", [True, False], ids=["not wanted", "not there"])
def test_pipelines_train_without_spans(hooks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hooks:
        monkeypatch.setattr(pipeline, "missing_hooks", lambda group: ["schedules._batch_p2p"])

    def work(world: World) -> Any:
        pipe = Pipeline.split(whole(), group=world, num_microbatches=4, loss=loss_of, spans=not hooks)
        position = trace.ring.position
        pipe.step(*batches(1, 8)[0])
        spans = [span for span in trace.ring.since(position)[0] if span.stage >= 0]
        return spans, pipe.peak_activations(), {name: p.grad for name, p in pipe.named_parameters()}

    model = whole()
    x, y = batches(1, 8)[0]
    loss_of(model(x), y).backward()
    for spans, peaks, gradients in World.mock(2).run(work):
        assert (spans, peaks) == ([], {})
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("schedule", list(PipelineSchedule))
def test_torch_provides_every_order(schedule: PipelineSchedule) -> None:
    stages = 8 if schedule.has_many_stages else 4
    orders = actions(schedule, num_ranks=4, num_stages=stages, num_microbatches=8)
    assert len(orders) == 4
    forwards = [(stage, number) for order in orders for action, stage, number in order if action == "F"]
    assert sorted(forwards) == [(stage, number) for stage in range(stages) for number in range(8)]


def peak_of_four_ranks(schedule: str, num_microbatches: int, stages: int = 8) -> int:
    stats = PipelineMemoryStats.of(schedule, num_ranks=4, num_microbatches=num_microbatches, num_stages=stages)
    return stats.peak_activations


def test_closed_forms() -> None:
    stats = PipelineMemoryStats
    assert stats.gpipe_peak_activations(4, 8) == 8
    assert stats.one_f_one_b_peak_activations(4, 8) == 4
    assert stats.of("1F1B", num_ranks=4, num_microbatches=8).peak_per_stage == (4, 3, 2, 1)
    assert stats.of("GPipe", num_ranks=4, num_microbatches=8).peak_per_rank == (8, 8, 8, 8)
    assert peak_of_four_ranks("LoopedBFS", 5) == 10
    # Narayanan et al. (2021): (v - 1) P + 2 (P - 1) + 1 on the first rank
    assert peak_of_four_ranks("Interleaved1F1B", 8) == 4 + 2 * 3 + 1
    assert peak_of_four_ranks("Interleaved1F1B", 8, stages=12) == 2 * 4 + 2 * 3 + 1
    # Qi et al. (2023): ZB-V keeps as much as 1F1B, P microbatches of two half-sized stages
    assert peak_of_four_ranks("ZBVZeroBubble", 10) == 2 * 4
    assert peak_of_four_ranks("InterleavedZeroBubble", 8) >= 8
    assert peak_of_four_ranks("DualPipeV", 10) == 2 * 4 + 1
    assert stats.of("1F1B", num_ranks=4, num_microbatches=8).peak_bytes(10) == (40, 30, 20, 10)
    with pytest.raises(UsageError, match="1F1B needs at least as many microbatches as stages"):
        stats.one_f_one_b_peak_activations(4, 2)


class Kept:
    """One tensor that autograd keeps for a backward."""

    calls: ClassVar[dict[tuple[int, int], int]] = {}
    """Number of tensors kept of a stage's forward, by (stage, index of the forward)."""
    peak: ClassVar[dict[int, int]] = {}
    """Peak number of forwards of which something was kept, by stage."""

    def __init__(self, stage: int, tensor: torch.Tensor, call: int) -> None:
        self.stage, self.tensor, self.call = stage, tensor, call
        self.count(+1)

    def count(self, change: int) -> None:
        """Count the forwards of which something is kept."""
        key = (self.stage, self.call)
        Kept.calls[key] = Kept.calls.get(key, 0) + change
        live = sum(1 for (stage, _), held in Kept.calls.items() if stage == self.stage and held)
        Kept.peak[self.stage] = max(Kept.peak.get(self.stage, 0), live)

    def __del__(self) -> None:
        self.count(-1)


class Watched(nn.Module):
    """A stage that counts what autograd keeps, per forward."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage, self.call = stage, 0
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.call += 1
        call = self.call
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: Kept(self.stage, tensor.detach(), call), lambda kept: kept.tensor
        ):
            return self.layers(x)


@pytest.mark.parametrize("case", [case for case in CASES if case[1] == 4], ids=str)
def test_live_microbatches_match_autograd(case: tuple[str, int, int, int], process_worlds: Any) -> None:
    schedule, ranks, stages, microbatches = case

    def work(world: World) -> dict[int, int]:
        pipe = Pipeline.from_modules(
            [Watched(stage) for stage in range(stages)], group=world, schedule=schedule, num_microbatches=microbatches
        )
        ((x, y),) = batches(1, microbatches)
        pipe.step(x, y, loss_of)
        Kept.calls.clear(), Kept.peak.clear()
        pipe.step(x, y, loss_of)
        return dict(Kept.peak)

    peaks = {
        stage: peak for reported in make(f"ranks-{ranks}", process_worlds).run(work) for stage, peak in reported.items()
    }
    stats = PipelineMemoryStats.of(schedule, num_ranks=ranks, num_stages=stages, num_microbatches=microbatches)
    assert tuple(peaks[stage] for stage in range(stages)) == stats.peak_per_stage


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", *LOOPED])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 32)])
def test_ideal_bubble(schedule: str, ranks: int, microbatches: int) -> None:
    spans = ideal_timeline(schedule, num_ranks=ranks, num_microbatches=microbatches)
    per_rank = 2 if schedule in LOOPED else 1
    assert bubble_fraction(spans) == pytest.approx((ranks - 1) / (per_rank * microbatches + ranks - 1), abs=1e-9)
    assert len(spans) == 2 * microbatches * ranks * per_rank


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_deferring_weight_gradients_reduces_the_bubble(schedule: str) -> None:
    plain = bubble_fraction(ideal_timeline("Interleaved1F1B", num_ranks=4, num_microbatches=8))
    assert bubble_fraction(ideal_timeline(schedule, num_ranks=4, num_microbatches=8)) < plain


def test_missing_spans_give_no_bubble() -> None:
    assert bubble_fraction([]) == 0.0
