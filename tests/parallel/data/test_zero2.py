"""ZeRO-2: each rank keeps all parameters, and gradients and optimizer states of some; test_strategies.py trains it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from axon_nb.comm import World, all_gather, sync_gradients
from axon_nb.errors import UsageError
from axon_nb.parallel import FSDP, ShardingStrategy, ZeRO2
from tests.support.training.models import batch, blocks, loss_of

S = ShardingStrategy


def _model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*blocks(3), nn.Linear(8, 8)).double()


def _batch(world: World, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(24)
    size = 24 // world.world_size() // 2
    start = (2 * world.rank() + number) * size
    return x.double()[start : start + size], y.double()[start : start + size]


def test_each_rank_keeps_gradients_and_states_of_its_share(two: Any) -> None:
    def work(world: World) -> Any:
        model = FSDP(_model(), world, strategy=S.GRADIENT_STATE)
        assert isinstance(model, ZeRO2)
        optimizer = model.optimizer(torch.optim.Adam, lr=0.1)
        x, y = _batch(world)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
        held, said = model.memory_stats(), model.memory_estimate()
        parts = ("param_memory_bytes", "grad_memory_bytes", "optim_memory_bytes")
        assert [getattr(held, part) for part in parts] == [getattr(said, part) for part in parts]
        return [getattr(held, part) for part in parts], said.unsharded_bytes

    found = two.run(work)
    whole = sum(p.numel() * 8 for p in _model().parameters())
    assert [parts[0] for parts, _ in found] == [whole, whole]
    assert sum(parts[1] for parts, _ in found) == whole
    assert sum(parts[2] for parts, _ in found) == 2 * whole
    assert max(parts[1] for parts, _ in found) < 0.6 * whole
    assert found[0][1] == 4 * whole


def test_batches_accumulate_with_and_without_no_sync_in_small_buckets(two: Any) -> None:
    """Twice reduced, or once at the end, also by sync_gradients alone: the sum of both batches' means."""

    def work(world: World) -> Any:
        found = []
        for way in ("reduced twice", "no_sync", "sync_gradients"):
            model = ZeRO2(_model(), world, bucket_size_mb=0.0005)
            for number in (0, 1):
                x, y = _batch(world, number)
                if way == "sync_gradients" or (way == "no_sync" and number == 0):
                    with model.no_sync():
                        loss_of(model(x), y).backward()
                else:
                    loss_of(model(x), y).backward()
            model.sync_gradients()
            here = [p.grad is not None for p in model.module.parameters()]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.module.parameters()]
            sums = [all_gather(gradient[None]).sum(0) for gradient in gradients]
            found.append((here, sums, model.clip_grad_norm(1e9)))
        plain = _model()
        for number in (0, 1):
            x, y = _batch(world, number)
            loss_of(plain(x), y).backward()
        sync_gradients(list(plain.parameters()))
        expected = [p.grad for p in plain.parameters()]
        for _, sums, norm in found:
            torch.testing.assert_close(sums, expected)
            assert norm == pytest.approx(float(nn.utils.get_total_norm([g for g in expected if g is not None])))
        return [here for here, _, _ in found]

    first, second = two.run(work)
    assert all(mine != other for row in zip(first, second, strict=True) for mine, other in zip(*row, strict=True))


def test_groups_of_parameters_keep_their_rates(two: Any) -> None:
    def work(world: World) -> Any:
        model = ZeRO2(_model(), world)
        parameters = list(model.module.parameters())
        groups = [{"params": parameters[:3], "lr": 0.5}, {"params": parameters[3:-1], "lr": 0.01}]
        optimizer = model.optimizer(torch.optim.SGD, groups, lr=1.0)
        x, y = _batch(world)
        loss_of(model(x), y).backward()
        optimizer.step()
        plain = _model()
        loss_of(plain(x), y).backward()
        sync_gradients(list(plain.parameters()))
        own = list(plain.parameters())
        torch.optim.SGD([{"params": own[:3], "lr": 0.5}, {"params": own[3:-1], "lr": 0.01}], lr=1.0).step()
        torch.testing.assert_close(model.full_state_dict(), plain.state_dict())
        return True

    assert all(two.run(work))


def test_unknown_options_are_refused() -> None:
    def work(world: World) -> str:
        with pytest.raises(UsageError) as caught:
            ZeRO2(_model(), world, static_graph=True)
        return str(caught.value)

    (said,) = set(World.mock(2).run(work))
    assert said == "ZeRO2 does not support static_graph=; options are bucket_size_mb and broadcast_buffers."
