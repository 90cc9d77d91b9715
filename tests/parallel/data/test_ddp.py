"""DDP against a single process: the same losses, gradients and weights on every number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from axon_nb.comm import GradSyncStrategy, NotInGroupError, ProcessGroup, World
from axon_nb.parallel import DDP
from tests.parallel.conftest import WORLDS
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
