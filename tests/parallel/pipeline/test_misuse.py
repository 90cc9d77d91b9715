"""Invalid pipelines and steps raise on all ranks, with the rule and numbers that fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from axon_nb.comm import World
from axon_nb.errors import UsageError
from axon_nb.parallel import DDP, FSDP, Pipeline, PipelineSchedule, axis_group, make_mesh
from axon_nb.parallel.pipeline.schedule import check_counts
from tests.parallel.pipeline.pipelines import batches, whole
from tests.support.training.models import blocks, loss_of


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages", "microbatches", "message"),
    [
        ("GPipe", 4, 3, 4, "3 stages on 4 ranks: GPipe needs one stage per rank, so 4"),
        ("1F1B", 2, 4, 4, "4 stages on 2 ranks: 1F1B needs one stage per rank; for 2 per rank, use Interleaved1F1B"),
        ("1F1B", 4, 4, 3, r"as many microbatches as stages \(4\); got 3\. Use num_microbatches=4 or schedule='GPipe'"),
        ("GPipe", 2, 2, 0, "num_microbatches must be at least 1; got 0"),
        ("LoopedBFS", 4, 6, 4, "6 stages on 4 ranks: the number of stages must be a multiple of the number of ranks"),
        ("Interleaved1F1B", 4, 8, 9, r"number of rounds, 9 // 4 = 2\. Use 8 or 10\."),
        ("InterleavedZeroBubble", 2, 4, 5, r"number of rounds, 5 // 2 = 2\. Use 4 or 6\."),
        ("ZBVZeroBubble", 2, 6, 8, "6 stages on 2 ranks: ZBVZeroBubble needs two stages per rank, so 4"),
        ("DualPipeV", 2, 4, 3, "DualPipeV needs at least as many microbatches .* schedule='ZBVZeroBubble'"),
    ],
)
def test_invalid_numbers_for_a_schedule(
    schedule: str, ranks: int, stages: int, microbatches: int, message: str
) -> None:
    counts = {"num_ranks": ranks, "num_stages": stages, "num_microbatches": microbatches}
    with pytest.raises(UsageError, match=message):
        check_counts(PipelineSchedule.of(schedule), **counts)


@pytest.mark.parametrize("given", ["1f1b", "one_f_one_b", "OneFOneBSchedule", PipelineSchedule.ONE_F_ONE_B])
def test_schedule_by_any_of_its_names(given: Any) -> None:
    assert PipelineSchedule.of(given) is PipelineSchedule.ONE_F_ONE_B


def test_unknown_schedule_raises() -> None:
    with pytest.raises(UsageError, match=r"schedule must be one of 'GPipe', '1F1B', 'Interleaved1F1B', .*; got '2F2B'"):
        PipelineSchedule.of("2F2B")


def _message(call: Any) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""


def test_invalid_steps_raise_on_all_ranks(two: Any) -> None:
    def work(world: World) -> Any:
        pipe = Pipeline.split(whole(), group=world, num_microbatches=4)
        ((x, y),) = batches(1, 10)
        first, last = pipe.is_first, pipe.is_last
        reported = [
            _message(lambda: pipe.step(x, y, loss_of)),
            _message(lambda: pipe.step(x[:8], y, loss_of)),
            _message(lambda: pipe.step(x[:8], y[:4], loss_of)),
            _message(lambda: pipe.step(None, y[:8], loss_of)),
            _message(lambda: pipe.step(x[:8] if first else None, None, loss_of)),
            _message(lambda: pipe.step(x[:8], y[:8])),
            _message(lambda: pipe.step(3 if first else None, y[:8], loss_of)),
            _message(lambda: pipe.step((x[:8], None), y[:8], loss_of)),
            _message(lambda: pipe.step(x[:8], [1, 2], loss_of)),
            _message(lambda: pipe.step(torch.tensor(1.0), y[:8], loss_of)),
            _message(lambda: pipe.step((x, x[:8]), y[:8], loss_of)),
            _message(lambda: pipe(x[:2])),
            _message(pipe),
            _message(lambda: pipe.step(x[:8], y[:8], loss_of, arg_mbs=[x[:2]] * 4)),
            _message(lambda: pipe.step(None, y[:8], loss_of, arg_mbs=[x[:2]] * 3)),
            _message(lambda: pipe.step(None, y[:8], loss_of, arg_mbs=x[:4])),
            _message(lambda: pipe.step(None, y[:8], loss_of, arg_mbs=[x[:2], x[:3], x[:2], x[:1]])),
            _message(lambda: pipe.step(None, y[:8], loss_of, arg_mbs=[x[:2], None, x[:2], x[:1]])),
            _message(lambda: pipe.step(x[:8], None, loss_of, target_mbs=[y[:2]] * 5)),
            _message(lambda: pipe.step(x[:8], None, loss_of, target_mbs=[y[:1]] * 4)),
            _message(lambda: pipe.step(x[:8], y[:8], loss_of, kwarg_mbs=None if first else [{}])),
        ]
        with torch.no_grad():
            reported.append(_message(lambda: pipe.step(x[:8], y[:8], loss_of)))
        pipe.step(x[:8] if first else None, y[:8] if last else None, loss_of)  # and it still works
        return reported

    expected = [
        (
            "x: the number of samples must be divisible by num_microbatches (4); got 10. Use a batch of 8 or 12 "
            "samples (on rank 0)."
        ),
        (
            "target: the number of samples must be divisible by num_microbatches (4); got 10. Use a batch of 8 or 12 "
            "samples (on rank 1)."
        ),
        "x and target must have equally many samples; got 8 and 4.",
        "x is missing (on rank 0).",
        "target is missing (on rank 1).",
        "no loss given: use pipe.step(x, target, loss) or Pipeline(…, loss=loss) (on rank 1).",
        "x must be a tensor, or a tuple of tensors, with samples along dim 0; got int (on rank 0).",
        "x must be a tensor, or a tuple of tensors, with samples along dim 0; got NoneType (on rank 0).",
        "target must be a tensor with samples along dim 0; got list (on rank 1).",
        "x must be a tensor, or a tuple of tensors, with samples along dim 0; got a scalar (on rank 0).",
        "the tensors of x must have equally many samples; got 8 and 10 (on rank 0).",
        (
            "x: the number of samples must be divisible by num_microbatches (4); got 2. Use a batch of 4 samples "
            "(on rank 0)."
        ),
        "x is missing (on rank 0).",
        "pass x or arg_mbs, not both (on rank 0).",
        "arg_mbs must be a list of num_microbatches (4) parts; got 3 (on rank 0).",
        "arg_mbs must be a list of num_microbatches (4) parts; got Tensor (on rank 0).",
        (
            "all microbatches of arg_mbs must have the same shapes and types; got [2, 8] torch.float64 and [3, 8] "
            "torch.float64 (on rank 0)."
        ),
        "arg_mbs[1] is missing (on rank 0).",
        "target_mbs must be a list of num_microbatches (4) parts; got 5 (on rank 1).",
        "x and target must have equally many samples; got 8 and 4.",
        "kwarg_mbs must be a list of num_microbatches (4) parts; got 1 (on rank 1).",
        "step() needs gradients, which are disabled here; for inference use pipe(x) (on rank 0).",
    ]
    assert two.run(work) == [expected] * 2


def test_unsplittable_models_raise() -> None:
    def work(world: World) -> list[str]:
        alone = axis_group(make_mesh(dp=1, pp=2, device="cpu"), "dp")
        tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        tied[1].weight = tied[0].weight
        return [
            _message(lambda: Pipeline.split(nn.Linear(2, 2), group=world)),
            _message(lambda: Pipeline.split(whole(), group=world, at=["9"])),
            _message(lambda: Pipeline.split(whole(), group=world, at=["0"])),
            _message(lambda: Pipeline.split(whole(), group=world, at=["3"], num_stages=4)),
            _message(lambda: Pipeline.split(blocks(1), group=world)),
            _message(lambda: Pipeline.split(whole(), group=world, split="size")),  # type: ignore[arg-type]
            _message(lambda: Pipeline.split(whole(), group=world, split="time")),
            _message(lambda: Pipeline.split(whole(), group=world, split=lambda block: -1.0)),
            _message(lambda: Pipeline.split(tied, group=world)),
            _message(
                lambda: Pipeline.split(whole(), group=world, schedule="ZBVZeroBubble", wrap=lambda s: DDP(s, alone))
            ),
            _message(
                lambda: Pipeline.split(whole(), group=world, schedule="ZBVZeroBubble", wrap=lambda s: FSDP(s, alone))
            ),
        ]

    starts = [
        "Linear is not an nn.Sequential, so the order of its children is unknown.",
        "at: the model has no child '9'; its children are 0, 1, 2, 3, 4, 5, 6, 7.",
        "at must list children in the model's order, without the first one (0)",
        "at=['3'] defines 2 stages, but num_stages=4; pass only one.",
        "num_stages must be 1 to 1, the number of modules; got 2.",
        "split must be 'params', 'time' or a function",
        "split='time' needs sample=",
        "costs must be 0 or more; got [-1.0, -1.0,",
        "1.weight of stage 1 is also 0.weight of stage 0. Stages cannot share parameters",
        "ZBVZeroBubble computes weight gradients without the hooks of DDP; use torch's fully_shard",
        "ZBVZeroBubble computes weight gradients without the hooks of FSDP inside a module; use torch's fully_shard",
    ]
    for reported in World.mock(2).run(work):
        for text, start in zip(reported, starts, strict=True):
            assert text.startswith(start), text


def test_exception_in_a_stage_is_raised_unchanged() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("mine")

    def work(world: World) -> None:
        pipe = Pipeline.from_modules([blocks(1), Broken()], group=world, loss=loss_of)
        ((x, y),) = batches(1, 8)
        pipe.step(x, y)

    with pytest.raises(ValueError, match="mine"):
        World.mock(2).run(work)
