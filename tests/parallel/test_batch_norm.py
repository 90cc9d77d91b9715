"""BatchNorm under DDP: all ranks get rank 0's statistics; with SyncBatchNorm, ranks train like one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from axon_nb.comm import GradSyncStrategy, ProcessGroup, TensorError, World
from axon_nb.parallel import DDP, SyncBatchNorm
from tests.support.training.models import batch, loss_of

SIZE = 12
"""Samples per batch; divisible by 2, 3 and 4 ranks."""


def normed() -> nn.Sequential:
    """Return a model with BatchNorm, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 8))
        return model.double()


def steps_of(model: nn.Module, own: slice, *, weigh: float = 1.0) -> list[torch.Tensor]:
    """Weights and buffers after some steps on a part of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = (part[own] for part in batch(SIZE))
    for _ in range(4):
        optimizer.zero_grad()
        (weigh * loss_of(model(x), y)).backward()
        optimizer.step()
    bare = model.module if isinstance(model, DDP) else model
    return [item.detach().clone() for item in bare.state_dict().values()]


def test_ranks_train_as_one_process(world: Any) -> None:
    def work(world: World) -> Any:
        count = SIZE // world.world_size()
        own = slice(world.rank() * count, (world.rank() + 1) * count)
        model = SyncBatchNorm.convert(normed())
        assert type(model[1]) is SyncBatchNorm  # type: ignore[index]
        return steps_of(DDP(model), own)

    expected = steps_of(normed(), slice(None))
    for values in world.run(work):
        for value, reference in zip(values, expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-10, atol=1e-11)


def test_parts_of_different_sizes(two: Any) -> None:
    """Rank 0 has 2 samples, rank 1 has 10; losses are weighted by their number, as DDP's mean is over ranks."""

    def work(world: World) -> Any:
        own = slice(2, None) if world.rank() else slice(2)
        return steps_of(DDP(SyncBatchNorm.convert(normed())), own, weigh=2 * (10 if world.rank() else 2) / SIZE)

    expected = steps_of(normed(), slice(None))
    for values in two.run(work):
        for value, reference in zip(values, expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("strategy", list(GradSyncStrategy))
def test_running_statistics_are_rank_0s_on_all_ranks(two: Any, strategy: GradSyncStrategy) -> None:
    """Buffers are sent before a forward; `sync_parameters` sends the last update as well."""

    def work(world: World) -> Any:
        model: Any = DDP(normed(), strategy=strategy)
        seen = []
        for step in range(3):
            x = batch(SIZE)[0] * (world.rank() + step + 1)
            model(x).sum().backward()
            model.sync_gradients()
            seen.append(model.module[1].running_mean.clone())
        model.sync_parameters()
        return seen, model.module[1].running_mean, model.module[1].num_batches_tracked.item()

    answers = two.run(work)
    alone: Any = normed()
    for step in range(3):
        alone(batch(SIZE)[0] * (step + 1))
    for _, mean, count in answers:
        torch.testing.assert_close(mean, alone[1].running_mean, rtol=1e-12, atol=1e-12)
        assert count == 3
    assert not torch.equal(answers[0][0][-1], answers[1][0][-1]), "each rank has seen its own samples"


def test_without_broadcast_buffers_each_rank_keeps_its_own(two: Any) -> None:
    def work(world: World) -> Any:
        model: Any = DDP(normed(), broadcast_buffers=False)
        for _ in range(2):
            model(batch(SIZE)[0] * (world.rank() + 1)).sum().backward()
        return model.module[1].running_mean

    first, second = two.run(work)
    torch.testing.assert_close(first * 2, second, rtol=0.5, atol=1)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm2d(3),
        lambda: nn.BatchNorm2d(3, affine=False),
        lambda: nn.BatchNorm2d(3, momentum=None),
        lambda: nn.BatchNorm2d(3, track_running_stats=False),
    ],
    ids=["plain", "without weights", "cumulative", "without statistics"],
)
def test_every_kind_equals_torchs_on_one_rank(make: Any) -> None:
    theirs = make()
    ours = SyncBatchNorm.convert(make(), group=ProcessGroup.mock())
    for step in range(3):
        x = torch.randn(4, 3, 2, 5, generator=torch.Generator().manual_seed(step))
        torch.testing.assert_close(ours(x), theirs(x))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
    ours.eval()
    theirs.eval()
    torch.testing.assert_close(ours(x), theirs(x))
    half = x.bfloat16()
    assert ours.train().bfloat16()(half).dtype is torch.bfloat16


def test_single_value_per_channel_raises_on_all_ranks(two: Any) -> None:
    def work(world: World) -> None:
        model = SyncBatchNorm.convert(nn.BatchNorm1d(2))
        with pytest.raises(TensorError, match="at least 2 values per channel over all ranks to train; got 1"):
            model(torch.ones(1 - world.rank(), 2))

    two.run(work)


def test_torch_sync_batch_norm_is_rejected_with_fix() -> None:
    model: Any = nn.SyncBatchNorm.convert_sync_batchnorm(normed())
    with pytest.raises(
        TensorError, match=r"works on GPUs only, and the model is on cpu; .*SyncBatchNorm.convert\(model\)"
    ):
        DDP(model, group=ProcessGroup.mock())
    converted: Any = SyncBatchNorm.convert(model, group=ProcessGroup.mock())
    x, y = batch(SIZE)
    loss_of(DDP(converted, ProcessGroup.mock())(x), y).backward()
    with pytest.raises(TensorError, match=r"of shape \(samples, channels, …\); got shape \(3,\)"):
        converted[1](torch.ones(3))
    with pytest.raises(TensorError, match="LazyBatchNorm1d is lazy and has no shape yet"):
        SyncBatchNorm.convert(nn.LazyBatchNorm1d())


def test_forward_that_a_conversion_would_drop_is_refused() -> None:
    class Doubled(nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
            return 2 * super().forward(input)

    class Named(nn.BatchNorm1d):
        pass

    with pytest.raises(TensorError, match="Doubled has a forward of its own, which a SyncBatchNorm would drop"):
        SyncBatchNorm.convert(nn.Sequential(nn.Linear(2, 2), Doubled(2)))
    calls: list[str] = []
    (norm := Named(2)).register_forward_hook(lambda *_: calls.append("called"))
    converted = SyncBatchNorm.convert(SyncBatchNorm.convert(nn.Sequential(norm, nn.SyncBatchNorm(2)))).eval()
    assert [type(layer) for layer in converted] == [SyncBatchNorm, SyncBatchNorm]
    converted(torch.ones(2, 2))
    assert calls == ["called"]
