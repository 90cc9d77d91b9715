"""What cannot be a pipeline, or a step of one, is refused on all ranks, with the rule and numbers that fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from axon_nb.comm import CommError, World
from axon_nb.parallel import DDP, Pipeline, PipelineSchedule, axis_group, make_mesh
from axon_nb.parallel.pipeline.schedule import check_counts
from tests.comm.models import blocks, loss_of
from tests.parallel.pipelines import batches, whole


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages", "microbatches", "told"),
    [
        ("GPipe", 4, 3, 4, "3 stages on 4 ranks: GPipe has one stage a rank, so 4"),
        ("1F1B", 2, 4, 4, "4 stages on 2 ranks: 1F1B has one stage a rank; with 2 a rank take Interleaved1F1B"),
        ("1F1B", 4, 4, 3, "num_microbatches=3 with 1F1B and 4 stages: .* num_microbatches=4, or schedule='GPipe'"),
        ("GPipe", 2, 2, 0, "num_microbatches=0 with GPipe: a batch has at least 1"),
        ("LoopedBFS", 4, 6, 4, "6 stages on 4 ranks: every rank holds as many, so it is a multiple of 4"),
        ("Interleaved1F1B", 4, 8, 9, r"9 // 4 = 2 rounds, and 9 is no multiple of 2; num_microbatches=8 or 10 is"),
        ("InterleavedZeroBubble", 2, 4, 5, r"5 // 2 = 2 rounds, and 5 is no multiple of 2; num_microbatches=4 or 6 is"),
        ("ZBVZeroBubble", 2, 6, 8, "6 stages on 2 ranks: ZBVZeroBubble has exactly two stages a rank, so 4"),
        ("DualPipeV", 2, 4, 3, "num_microbatches=3 with DualPipeV and 4 stages: .* schedule='ZBVZeroBubble'"),
    ],
)
def test_numbers_that_do_not_fit_a_schedule(
    schedule: str, ranks: int, stages: int, microbatches: int, told: str
) -> None:
    counts = {"num_ranks": ranks, "num_stages": stages, "num_microbatches": microbatches}
    with pytest.raises(CommError, match=told):
        check_counts(PipelineSchedule.of(schedule), **counts)


@pytest.mark.parametrize("given", ["1f1b", "one_f_one_b", "OneFOneBSchedule", PipelineSchedule.ONE_F_ONE_B])
def test_a_schedule_by_any_of_its_names(given: Any) -> None:
    assert PipelineSchedule.of(given) is PipelineSchedule.ONE_F_ONE_B


def test_an_unknown_schedule() -> None:
    with pytest.raises(CommError, match="schedule='2F2B': it is one of 'GPipe', '1F1B', 'Interleaved1F1B'"):
        PipelineSchedule.of("2F2B")


def _told(call: Any) -> str:
    try:
        call()
    except CommError as error:
        return str(error)
    return ""


def test_what_a_step_refuses_on_all_ranks(two: Any) -> None:
    def work(world: World) -> Any:
        pipe = Pipeline.split(whole(), group=world, num_microbatches=4)
        ((x, y),) = batches(1, 10)
        first, last = pipe.is_first, pipe.is_last
        told = [
            _told(lambda: pipe.step(x, y, loss_of)),
            _told(lambda: pipe.step(x[:8], y, loss_of)),
            _told(lambda: pipe.step(x[:8], y[:4], loss_of)),
            _told(lambda: pipe.step(None, y[:8], loss_of)),
            _told(lambda: pipe.step(x[:8] if first else None, None, loss_of)),
            _told(lambda: pipe.step(x[:8], y[:8])),
            _told(lambda: pipe.step(3 if first else None, y[:8], loss_of)),
            _told(lambda: pipe.step((x[:8], None), y[:8], loss_of)),
            _told(lambda: pipe.step(x[:8], [1, 2], loss_of)),
            _told(lambda: pipe.step(torch.tensor(1.0), y[:8], loss_of)),
            _told(lambda: pipe.step((x, x[:8]), y[:8], loss_of)),
            _told(lambda: pipe(x[:2])),
            _told(pipe),
        ]
        with torch.no_grad():
            told.append(_told(lambda: pipe.step(x[:8], y[:8], loss_of)))
        pipe.step(x[:8] if first else None, y[:8] if last else None, loss_of)  # and it still works
        return told

    expected = [
        (
            "x has 10 samples and num_microbatches=4: 10 / 4 = 2.5 is no whole number; a batch of 8 or 12 samples "
            "is cut evenly (on rank 0)."
        ),
        (
            "target has 10 samples and num_microbatches=4: 10 / 4 = 2.5 is no whole number; a batch of 8 or 12 samples "
            "is cut evenly (on rank 1)."
        ),
        "x has 8 samples and target 4: each sample has its target.",
        "x is missing (on rank 0).",
        "target is missing (on rank 1).",
        "there is no loss: pipe.step(x, target, loss), or Pipeline(…, loss=loss) (on rank 1).",
        "x is int: it is a tensor, or a tuple of tensors, with samples along dim 0 (on rank 0).",
        "x holds NoneType: it is a tensor, or a tuple of tensors, with samples along dim 0 (on rank 0).",
        "target is list: it is a tensor with samples along dim 0 (on rank 1).",
        "x is a number: it is a tensor, or a tuple of tensors, with samples along dim 0 (on rank 0).",
        "x holds tensors of 8 and 10 samples: they have as many, along dim 0 (on rank 0).",
        (
            "x has 2 samples and num_microbatches=4: 2 / 4 = 0.5 is no whole number; a batch of 4 samples is "
            "cut evenly (on rank 0)."
        ),
        "x is missing (on rank 0).",
        "step() trains, and gradients are off here: pipe(x) is the forward without them (on rank 0).",
    ]
    assert two.run(work) == [expected] * 2


def test_models_that_cannot_be_cut() -> None:
    def work(world: World) -> list[str]:
        alone = axis_group(make_mesh(dp=1, pp=2, device="cpu"), "dp")
        tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        tied[1].weight = tied[0].weight
        return [
            _told(lambda: Pipeline.split(nn.Linear(2, 2), group=world)),
            _told(lambda: Pipeline.split(whole(), group=world, at=["9"])),
            _told(lambda: Pipeline.split(whole(), group=world, at=["0"])),
            _told(lambda: Pipeline.split(whole(), group=world, at=["3"], num_stages=4)),
            _told(lambda: Pipeline.split(blocks(1), group=world)),
            _told(lambda: Pipeline.split(whole(), group=world, split="size")),  # type: ignore[arg-type]
            _told(lambda: Pipeline.split(whole(), group=world, split="time")),
            _told(lambda: Pipeline.split(whole(), group=world, split=lambda block: -1.0)),
            _told(lambda: Pipeline.split(tied, group=world)),
            _told(lambda: Pipeline.split(whole(), group=world, schedule="ZBVZeroBubble", wrap=lambda s: DDP(s, alone))),
        ]

    starts = [
        "Linear is no nn.Sequential, so it is not known in which order",
        "at='9': the model's children are 0, 1, 2, 3, 4, 5, 6, 7.",
        "at=['0']: each name is where the next stage begins, so they are in the model's order, and the first child, 0",
        "at=['3'] makes 2 stages, and num_stages=4: leave one away.",
        "1 modules cannot be cut into 2 stages: a stage has at least one.",
        "split='size': it is 'params', 'time', or a function",
        "split='time' runs the model once: give it sample=",
        "the costs are [-1.0, -1.0,",
        "1.weight of stage 1 is 0.weight of stage 0: each rank would train a copy of its own",
        "ZBVZeroBubble with a stage in DDP: gradients of weights come without the hooks that DDP averages in",
    ]
    for told in World.mock(2).run(work):
        for text, start in zip(told, starts, strict=True):
            assert text.startswith(start), text


def test_what_a_stage_raises_is_raised_as_it_is() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("mine")

    def work(world: World) -> None:
        pipe = Pipeline.from_modules([blocks(1), Broken()], group=world, loss=loss_of)
        ((x, y),) = batches(1, 8)
        pipe.step(x, y)

    with pytest.raises(ValueError, match="mine"):
        World.mock(2).run(work)
