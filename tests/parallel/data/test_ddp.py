"""DDP against a single process: the same losses, gradients and weights on every number of ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.checkpoint import checkpoint

from axon_nb.comm import GradSyncStrategy, NotInGroupError, ProcessGroup, TensorMismatchError, World
from axon_nb.errors import UsageError
from axon_nb.parallel import DDP
from tests.parallel.conftest import WORLDS, make
from tests.support.cases.pairwise import pairwise
from tests.support.training.models import batch, blocks, loss_of

SIZE = 12
"""Samples per batch; divisible by 2, 3 and 4 ranks."""


def trained(model: nn.Module, own: slice, *, steps: int = 3, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Weights after some steps of Adam on a part of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = (part.to(dtype)[own] for part in batch(SIZE))
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def part(world: World) -> slice:
    """This rank's samples."""
    count = SIZE // world.world_size()
    return slice(world.rank() * count, (world.rank() + 1) * count)


@pytest.mark.parametrize(
    ("world", "strategy", "dtype"),
    pairwise(WORLDS, [GradSyncStrategy.OVERLAPPED, GradSyncStrategy.SYNCHRONOUS], [torch.float64, torch.float32]),
    indirect=["world"],
    ids=str,
)
def test_weights_match_one_process(world: Any, strategy: GradSyncStrategy, dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-10, torch.float32: 5e-6}[dtype]

    def work(world: World) -> list[torch.Tensor]:
        model = DDP(blocks().to(dtype), world, bucket_size_mb=0.001, strategy=strategy)
        return trained(model, part(world), dtype=dtype)

    expected = trained(blocks().to(dtype), slice(None), dtype=dtype)
    answers = world.run(work)
    for weights in answers:
        for weight, reference in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight, reference, rtol=tolerance, atol=tolerance)
        assert all(torch.equal(a, b) for a, b in zip(weights, answers[0], strict=True)), "ranks agree to the bit"


def test_every_rank_starts_with_the_weights_of_rank_0(two: Any) -> None:
    def work(world: World) -> Any:
        torch.manual_seed(world.rank())
        model: Any = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        model[1].running_mean.fill_(float(world.rank()))
        wrapped = DDP(model)
        before = torch.cat([p.detach().flatten() for p in wrapped.parameters()])
        with torch.no_grad():
            model[0].weight.add_(world.rank() + 1)
        wrapped.sync_parameters(src=1)
        return before, model[0].weight.detach().clone(), model[1].running_mean.clone()

    (first, weight, mean), (second, weight_too, mean_too) = two.run(work)
    assert torch.equal(first, second)
    assert torch.equal(weight, weight_too)
    assert torch.equal(mean, mean_too)


def test_accumulation_communicates_once_per_step(two: Any) -> None:
    def work(world: World) -> Any:
        calls = []
        model = DDP(blocks(), strategy=GradSyncStrategy.SYNCHRONOUS)

        def counted(state: Any, bucket):  # type: ignore[no-untyped-def]
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            calls.append(bucket.index())
            return allreduce_hook(state, bucket)

        model.register_comm_hook(None, counted)
        x, y = (half[part(world)] for half in batch(SIZE))
        for index in range(3):
            if index < 2:
                with model.no_sync():
                    (loss_of(model(x[2 * index : 2 * index + 2]), y[2 * index : 2 * index + 2]) / 3).backward()
                    assert calls == []
            else:
                (loss_of(model(x[4:]), y[4:]) / 3).backward()
        return calls, [p.grad for p in model.parameters()]

    model = blocks()
    x, y = batch(SIZE)
    loss_of(model(x), y).backward()
    for calls, gradients in two.run(work):
        assert calls == [0]
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-12)


def test_no_sync_strategy_averages_on_request_and_only_once(two: Any) -> None:
    def work(world: World) -> Any:
        model = DDP(blocks(), strategy=GradSyncStrategy.NO_SYNC)
        x, y = (half[part(world)] for half in batch(SIZE))
        loss_of(model(x), y).backward()
        alone = model.module[0].up.weight.grad.clone()
        model.sync_gradients()
        together = model.module[0].up.weight.grad.clone()
        model.sync_gradients()
        return alone, together, model.module[0].up.weight.grad, model.strategy

    model: Any = blocks()
    x, y = batch(SIZE)
    loss_of(model(x), y).backward()
    answers = two.run(work)
    assert not torch.equal(answers[0][0], answers[1][0])
    for _, together, again, strategy in answers:
        torch.testing.assert_close(together, model[0].up.weight.grad, rtol=1e-10, atol=1e-12)
        assert torch.equal(together, again)
        assert strategy is GradSyncStrategy.NO_SYNC


def test_sync_gradients_after_an_automatic_sync_changes_nothing(two: Any) -> None:
    def work(world: World) -> bool:
        model = DDP(blocks())
        x, y = (half[part(world)] for half in batch(SIZE))
        loss_of(model(x), y).backward()
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.sync_gradients()
        return all(
            torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True) if p.grad is not None
        )

    assert two.run(work) == [True, True]


def test_uneven_inputs_with_join(process_worlds: Any) -> None:
    def work(world: World) -> list[float]:
        model: Any = DDP(nn.Linear(1, 1, bias=False).double())
        gradients = []
        with model.join():
            for step in range(2 + 3 * world.rank()):
                model.zero_grad()
                model(torch.full((1, 1), 1.0 + step, dtype=torch.float64)).sum().backward()
                gradients.append(model.module.weight.grad.item())
        return gradients

    # A rank without inputs counts as a gradient of zero.
    assert make("ranks-2", process_worlds).run(work) == [[1.0, 2.0], [1.0, 2.0, 1.5, 2.0, 2.5]]


def test_the_published_tutorial_trains(two: Any) -> None:
    """PyTorch's DDP tutorial, with our DDP instead of torch's."""

    def demo_basic(world: World) -> Any:
        torch.manual_seed(world.rank())

        class ToyModel(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net1 = nn.Linear(10, 10)
                self.relu = nn.ReLU()
                self.net2 = nn.Linear(10, 5)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.net2(self.relu(self.net1(x)))
                return out

        model = ToyModel()
        ddp_model = DDP(model)
        loss_fn = nn.MSELoss()
        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
        optimizer.zero_grad()
        before = parameters_to_vector(model.parameters()).detach()
        inputs, labels = torch.randn(20, 10), torch.randn(20, 5)
        alone = copy.deepcopy(model)
        loss_fn(alone(inputs), labels).backward()
        outputs = ddp_model(inputs)
        loss_fn(outputs, labels).backward()
        optimizer.step()
        own = torch.cat([p.grad.flatten() for p in alone.parameters() if p.grad is not None])
        return before, own, parameters_to_vector(model.parameters()).detach()

    answers = two.run(demo_basic)
    (start, first, _), (_, second, _) = answers
    assert not torch.allclose(first, second), "the ranks have different data"
    for before, _, after in answers:
        assert torch.equal(before, start), "rank 0's weights, on all ranks"
        torch.testing.assert_close(after, start - 0.001 * (first + second) / 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16-scaler", "bf16"])
def test_mixed_precision_keeps_ranks_together(two: Any, dtype: torch.dtype) -> None:
    def work(world: World) -> Any:
        model = DDP(blocks().float())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, init_scale=2.0**10)
        x, y = (half.float()[part(world)] for half in batch(SIZE))
        losses = []
        for step in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = loss_of(model(x).float(), y)
            if step == 2 and world.rank() == 0 and dtype is torch.float16:
                loss = loss * float("inf")  # one rank overflows: all must skip the step
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return [p.detach() for p in model.parameters()], losses, scaler.get_scale()

    (weights, losses, scale), (weights_too, _, scale_too) = two.run(work)
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_too, strict=True))
    assert all(bool(weight.isfinite().all()) for weight in weights)
    assert scale == scale_too == (2.0**9 if dtype is torch.float16 else 1.0)
    assert losses[-1] < losses[0]


def test_activation_checkpointing_gives_the_same_gradients(two: Any) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    def work(world: World) -> list[torch.Tensor]:
        return trained(DDP(Checkpointed()), part(world))

    expected = trained(blocks(), slice(None))
    for weights in two.run(work):
        for weight, reference in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight, reference, rtol=1e-10, atol=1e-10)


def test_ddp_in_a_group_of_some_ranks(four: Any) -> None:
    def work(world: World) -> Any:
        group = world.new_group([1, 3])
        if not group.contains(world.rank()):
            with pytest.raises(NotInGroupError):
                DDP(blocks(), group)
            return None
        model = DDP(blocks(), group)
        x, y = (half.chunk(2)[group.rank()] for half in batch(SIZE))
        loss_of(model(x), y).backward()
        return model.module[0].up.weight.grad, model.group.ranks

    answers = four.run(work)
    model: Any = blocks()
    x, y = batch(SIZE)
    loss_of(model(x), y).backward()
    assert answers[0] is answers[2] is None
    for gradient, ranks in (answers[1], answers[3]):
        torch.testing.assert_close(gradient, model[0].up.weight.grad, rtol=1e-10, atol=1e-12)
        assert ranks == (1, 3)


def test_ddp_in_a_single_process_world() -> None:
    for group in (ProcessGroup.mock(), World.mock()):
        model = DDP(blocks(), group)
        assert all(
            torch.equal(a, b) for a, b in zip(trained(model, slice(None)), trained(blocks(), slice(None)), strict=True)
        )


def test_mismatched_model_names_its_parameter(two: Any) -> None:
    def work(world: World) -> None:
        DDP(nn.Linear(4, 2 + world.rank()))

    with pytest.raises(
        TensorMismatchError,
        match=r"rank 0 has weight of torch.float32 \(2, 4\), rank 1 has weight of torch.float32 \(3, 4\)",
    ):
        two.run(work)


def test_unsupported_models_and_options_raise() -> None:
    group = ProcessGroup.mock()
    with pytest.raises(UsageError, match="ReLU has no parameter that requires a gradient"):
        DDP(nn.ReLU(), group)
    with pytest.raises(UsageError, match="bucket_size_mb must be a positive number of MiB; got 0"):
        DDP(blocks(), group, bucket_size_mb=0)
