"""Pipelines with all kinds of stages: several tensors, buffers, frozen parameters, DDP; changing batches; inference."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from axon_nb.comm import World
from axon_nb.parallel import DDP, Pipeline, PipelineStage, axis_group, make_mesh
from axon_nb.records import spans as trace
from tests.parallel.pipeline.pipelines import batches, merged, whole
from tests.support.training.models import blocks, loss_of


def test_gradients_add_up_over_steps_and_batches_may_change(two: Any) -> None:
    sizes = (8, 4, 4, 12)

    def work(world: World) -> Any:
        pipe = Pipeline.split(whole(), group=world, num_microbatches=4, loss=loss_of)
        outputs = []
        for rows in sizes:
            ((x, y),) = batches(1, rows)
            pipe.step(x, y)
            outputs.append(pipe(x))
        return {name: parameter.grad for name, parameter in pipe.named_parameters()}, outputs

    model, outputs = whole(), []
    for rows in sizes:
        ((x, y),) = batches(1, rows)
        loss_of(model(x), y).backward()
        outputs.append(model(x).detach())
    answers = two.run(work)
    for name, gradient in merged([own for own, _ in answers]).items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-10, atol=1e-13)
    assert answers[0][1] == [None] * len(sizes)
    for found, wanted in zip(answers[1][1], outputs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


class Two(nn.Module):
    """Maps two tensors to two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) + y, x * y


def _loss_of_two(outputs: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return loss_of(outputs[0] + outputs[1], target)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_stages_may_pass_several_tensors(two: Any, schedule: str) -> None:
    count = 4 if schedule == "ZBVZeroBubble" else 2

    def build() -> list[nn.Module]:
        torch.manual_seed(1)
        return [Two() for _ in range(count)]

    def work(world: World) -> Any:
        pipe = Pipeline.from_modules(build(), group=world, schedule=schedule, num_microbatches=4)
        ((x, y),) = batches(1, 8)
        before = pipe(x, y)
        pipe.step((x, y), y, _loss_of_two)
        return {name: parameter.grad for name, parameter in pipe.named_parameters()}, before

    stages = build()
    ((x, y),) = batches(1, 8)
    outputs = (x, y)
    for stage in stages:
        outputs = stage(*outputs)
    _loss_of_two(outputs, y).backward()
    answers = two.run(work)
    expected = {f"{i}.{name}": p.grad for i, stage in enumerate(stages) for name, p in stage.named_parameters()}
    found = merged([own for own, _ in answers])
    assert set(found) == set(expected)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-13)
    (before,) = [output for _, output in answers if output is not None]
    torch.testing.assert_close(before, tuple(out.detach() for out in outputs), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("schedule", ["1F1B", "LoopedBFS"])
def test_running_statistics_count_every_microbatch_once(two: Any, schedule: str) -> None:
    stages = 4 if schedule == "LoopedBFS" else 2

    def build() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4))).double()

    def work(world: World) -> Any:
        pipe = Pipeline.split(build(), group=world, num_stages=stages, schedule=schedule, num_microbatches=4)
        ((x, y),) = batches(1, 16)
        pipe.step(x, y, loss_of)
        return dict(pipe.named_buffers())

    model = build()
    ((x, _),) = batches(1, 16)
    for part in x.chunk(4):
        model(part)
    found = merged(two.run(work))
    assert set(found) == {name for name, _ in model.named_buffers()}
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(found[name], buffer)


def test_stages_with_devices_and_lazily_created_stages(two: Any) -> None:
    def work(world: World) -> Any:
        made = []

        def maker(index: int) -> Any:
            def make_stage() -> nn.Module:
                made.append(index)
                return blocks(2)[index]

            return make_stage

        pipe = Pipeline([PipelineStage(maker(index), "cpu") for index in range(2)], group=world, loss=loss_of)
        ((x, y),) = batches(1, 4)
        pipe.step(x, y)
        state = pipe.state_dict()
        pipe.load_state_dict(blocks(2).state_dict())
        return made, list(state), pipe.stage_indices, pipe.num_microbatches, repr(pipe).splitlines()[0]

    names = ["up.weight", "up.bias", "down.weight", "down.bias"]
    for rank, (made, state, own, microbatches, shown) in enumerate(two.run(work)):
        assert made == [rank]
        assert own == (rank,)
        assert state == [f"{rank}.{name}" for name in names]
        assert microbatches == 2
        assert "Pipeline(" in shown


def test_freezing_and_unfreezing_a_stage(two: Any) -> None:
    def steps(model: Any, train: Any) -> list[Any]:
        found = []
        for frozen in (False, True, False):
            for name, parameter in model.named_parameters():
                if name.startswith(("4.", "5.")):
                    parameter.requires_grad_(not frozen)
            model.zero_grad()
            ((x, y),) = batches(1, 8)
            train(x, y)
            found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        return found

    def work(world: World) -> Any:
        pipe = Pipeline.split(whole(), group=world, num_microbatches=4, loss=loss_of)
        return steps(pipe, pipe.step)

    model = whole()
    expected = steps(model, lambda x, y: loss_of(model(x), y).backward())
    answers = two.run(work)
    for number, wanted in enumerate(expected):
        found = merged([answer[number] for answer in answers])
        assert set(found) == set(wanted)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_stages_in_ddp(four: Any, schedule: str) -> None:
    """Two replicas of a pipeline on two ranks, each with half of the samples."""

    def work(world: World) -> Any:
        mesh = make_mesh(dp=2, pp=2, device="cpu")
        copies = axis_group(mesh, "dp")
        pipe = Pipeline.split(
            whole(),
            group=mesh["pp"],
            schedule=schedule,
            num_microbatches=3,
            loss=loss_of,
            wrap=lambda s: DDP(s, copies),
        )
        ((x, y),) = batches(1, 12)
        mine = slice(6 * copies.rank(), 6 * copies.rank() + 6)
        steps = []
        for _ in range(3):
            pipe.zero_grad()
            pipe.step(x[mine], y[mine])
            steps.append({name: parameter.grad for name, parameter in pipe.named_parameters()})
        return steps

    model = whole()
    ((x, y),) = batches(1, 12)
    loss_of(model(x), y).backward()
    answers = four.run(work)
    for ranks, step in itertools.product(((0, 1), (2, 3)), range(3)):
        found = merged([answers[rank][step] for rank in ranks])
        assert set(found) == {name for name, _ in model.named_parameters()}
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-10, atol=1e-13)


def test_forward_is_recorded(two: Any) -> None:
    def work(world: World) -> Any:
        pipe = Pipeline.split(whole(), group=world, schedule="LoopedBFS", num_microbatches=3)
        position = trace.ring.position
        pipe(batches(1, 6)[0][0])
        spans = [span for span in trace.ring.since(position)[0] if span.stage in pipe.stage_indices]
        return Counter((span.name, span.stage) for span in spans)

    assert two.run(work) == [
        {("F", 0): 3, ("SEND_F", 0): 3, ("RECV_F", 2): 3, ("F", 2): 3, ("SEND_F", 2): 3},
        {("RECV_F", 1): 3, ("F", 1): 3, ("SEND_F", 1): 3, ("RECV_F", 3): 3, ("F", 3): 3},
    ]


def test_changing_dtypes_between_stages(two: Any) -> None:
    """Single precision, bfloat16 autocast (within 2 %), double precision: the messages' dtype changes along."""

    def steps(model: Any, train: Any) -> list[Any]:
        found = []
        x, y = batches(1, 8, torch.float32)[0]
        for dtype, cast in ((torch.float32, False), (torch.float32, True), (torch.float64, False)):
            model.to(dtype)
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
                train(x.to(dtype), y.to(dtype))
            found.append({name: p.grad.double() for name, p in model.named_parameters()})
        return found

    def work(world: World) -> Any:
        pipe = Pipeline.split(whole(), group=world, num_microbatches=4, loss=loss_of)
        return steps(pipe, pipe.step)

    model = whole()
    expected = steps(model, lambda x, y: loss_of(model(x), y).backward())
    answers = two.run(work)
    for number, limit in enumerate((5e-6, 2e-2, 1e-10)):
        for name, gradient in merged([answer[number] for answer in answers]).items():
            wanted = expected[number][name]
            assert (gradient - wanted).norm() <= limit * wanted.norm(), (number, name)


def test_pipeline_of_one_rank() -> None:
    def work(world: World) -> Any:
        pipe = Pipeline.split(whole(), group=world, num_microbatches=4, loss=loss_of)
        ((x, y),) = batches(1, 8)
        losses = pipe.step(x, y)
        return pipe.mean_loss(losses), pipe(x), {name: p.grad for name, p in pipe.named_parameters()}

    ((loss, output, gradients),) = World.mock(1).run(work)
    model = whole()
    ((x, y),) = batches(1, 8)
    expected = loss_of(model(x), y)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(output, model(x).detach(), rtol=1e-12, atol=1e-13)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-10, atol=1e-13)
