"""Communication hooks: bytes sent, compression error, and convergence."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from axon_nb.comm import GradSyncStrategy, ProcessGroup, World
from axon_nb.errors import UsageError
from axon_nb.parallel import BF16, DDP, FP16, CommHook, Hierarchical, PowerSGD, TopK
from tests.support.training.models import batch, blocks, loss_of

MAKERS: dict[str, Any] = {
    "fp16": lambda: FP16(measure=True),
    "bf16": lambda: BF16(measure=True),
    "topk": lambda: TopK(0.1, measure=True),
    "powersgd": lambda: PowerSGD(2, measure=True),
    "hierarchical": lambda: Hierarchical(
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local")), measure=True
    ),
}
# (share of the bytes, largest relative error of a step, and of all steps together; no gradient at all: 1)
EXPECTED = {
    "fp16": (0.5, 1e-3, 1e-3),
    "bf16": (0.5, 1e-2, 1e-2),
    "topk": (0.2, 1.2, 0.5),  # a step also carries what earlier ones have left
    "powersgd": (0.75, 0.9, 0.5),
    "hierarchical": (2.0, 1e-6, 1e-6),
}


def hooked(name: str) -> tuple[DDP, CommHook]:
    """Return a float32 model with the hook."""
    model = DDP(blocks(2, 32).float(), strategy=GradSyncStrategy.SYNCHRONOUS)
    return model, model.register_hook(MAKERS[name]())


def gradient_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", list(MAKERS))
def test_bytes_and_error_are_counted(four: Any, name: str) -> None:
    def work(world: World) -> Any:
        model, hook = hooked(name)
        x, y = (half.float().chunk(4)[world.rank()] for half in batch(16, 32))
        total = torch.zeros(sum(p.numel() for p in model.parameters()))
        for _ in range(6):
            model.zero_grad()
            loss_of(model(x), y).backward()
            total += gradient_of(model)
        plain = DDP(copy.deepcopy(model.module))
        plain.zero_grad()
        loss_of(plain(x), y).backward()
        exact, stats = 6 * gradient_of(plain), hook.stats
        error = float((total - exact).norm() / exact.norm())
        return stats.bytes_uncompressed, stats.ratio, stats.error, error, len(total), gradient_of(model)

    share, limit, limit_of_all = EXPECTED[name]
    answers = four.run(work)
    for uncompressed, ratio, error, error_of_all, elements, gradient in answers:
        assert uncompressed == 6 * 4 * elements
        assert ratio == pytest.approx(share, rel=0.02) if name != "powersgd" else ratio < share
        assert 0 <= error < limit
        assert error_of_all < limit_of_all
        assert torch.equal(gradient, answers[0][-1]), "ranks agree to the bit"


def test_error_feedback_loses_nothing(four: Any) -> None:
    """TopK keeps what it did not send: that stays bounded, and all of it is sent once there are no new gradients."""
    num_steps, every = 400, 100

    def work(world: World) -> list[torch.Tensor]:
        model = nn.Linear(10, 1, bias=False)
        wrapped = DDP(model, strategy=GradSyncStrategy.SYNCHRONOUS)
        wrapped.register_hook(TopK(0.1))
        total, totals = torch.zeros(10), []
        x = torch.arange(1.0, 11.0).view(1, 10) * (world.rank() + 1)
        for step in range(1, num_steps + 11):
            wrapped.zero_grad()
            wrapped(x * (step <= num_steps)).sum().backward()
            assert model.weight.grad is not None
            total += model.weight.grad[0]
            if step % every == 0:
                totals.append(total.clone())
        return [*totals, total]

    mean = torch.arange(1.0, 11.0) * 2.5
    # Of 10 elements the largest is sent. It is at least a tenth of what is kept, so no more than 10 gradients are kept.
    for *totals, last in four.run(work):
        for count, total in enumerate(totals, 1):
            kept = mean * (every * count) - total
            assert kept.min() >= 0
            assert kept.sum() <= 10 * mean.sum()
        assert torch.equal(last, mean * num_steps), "10 steps without gradients sent the 10 elements that were kept"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_overflow_reaches_all_ranks_and_leaves_no_residual(two: Any, value: float) -> None:
    def work(world: World) -> Any:
        model = nn.Linear(50, 1, bias=False)
        wrapped = DDP(model)
        wrapped.register_hook(TopK(0.1))
        finite = []
        for factor in (value if world.rank() else 1.0, 1.0):
            wrapped.zero_grad()
            wrapped(torch.full((1, 50), factor)).sum().backward()
            assert model.weight.grad is not None
            finite.append(bool(model.weight.grad.isfinite().all()))
        return finite

    assert two.run(work) == [[False, True]] * 2


def test_hierarchical_averaging_sends_a_fraction_across_nodes(four: Any) -> None:
    def work(world: World) -> tuple[int, int]:
        model, hook = hooked("hierarchical")
        x, y = (half.float().chunk(4)[world.rank()] for half in batch(16, 32))
        loss_of(model(x), y).backward()
        assert isinstance(hook, Hierarchical)
        return hook.bytes_across_nodes, hook.stats.bytes_uncompressed

    for across, whole in four.run(work):
        assert across == pytest.approx(whole / 2, abs=8)


def digits(hook: Any) -> Any:
    """Return the accuracy on held-out digits after training with a hook on two ranks."""
    from sklearn.datasets import load_digits  # takes a second

    def work(world: World) -> float:
        torch.manual_seed(0)
        data = load_digits()
        x = torch.tensor(data.data, dtype=torch.float32) / 16
        y = torch.tensor(data.target)
        train, test = slice(0, 1400), slice(1400, None)
        model = DDP(
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), strategy=GradSyncStrategy.SYNCHRONOUS
        )
        if hook is not None:
            model.register_hook(hook())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        own = torch.arange(1400)[world.rank() :: 2]
        for epoch in range(6):
            order = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(epoch))]
            for rows in order.split(32):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[train][rows]), y[train][rows]).backward()
                optimizer.step()
        with torch.no_grad():
            return float((model(x[test]).argmax(1) == y[test]).float().mean())

    return World.mock(2).run(work)[0]


def test_training_converges_as_without_compression() -> None:
    plain = digits(None)
    assert plain > 0.9
    hooks: list[Any] = [FP16, BF16, lambda: TopK(0.1), lambda: PowerSGD(4)]
    hooks.append(lambda: Hierarchical(init_device_mesh("cpu", (1, 2), mesh_dim_names=("node", "local"))))
    for hook in hooks:
        assert digits(hook) > plain - 0.03


def test_invalid_arguments_raise() -> None:
    model = DDP(blocks(), ProcessGroup.mock())
    with pytest.raises(UsageError, match="PowerSGD needs all gradients in one bucket"):
        model.register_hook(PowerSGD())
    with pytest.raises(
        UsageError, match="ratio must be above 0 and at most 1, the fraction of elements to send; got 0"
    ):
        TopK(0)
    with pytest.raises(UsageError, match="PowerSGD needs rank >= 1 and start_step >= 2; got rank=0, start_step=2"):
        PowerSGD(0)
    assert math.isnan(FP16().stats.error)
    assert FP16().stats.ratio == 0
