"""Full parameters of sharded models: read, changed, saved and loaded, also between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import axon_nb
from axon_nb.comm import World
from axon_nb.errors import UsageError
from axon_nb.parallel import FSDP, ShardingStrategy, make_mesh
from tests.support.training.models import batch, blocks, loss_of

S = ShardingStrategy
SIZE = 12


def _fsdp(world: World, strategy: S, model: nn.Module | None = None) -> FSDP:
    mesh = make_mesh(replicate=2, shard=-1, device="cpu") if strategy is S.HYBRID_SHARD else None
    return FSDP(model or blocks(), None if mesh else world, strategy=strategy, mesh=mesh)


def _batch(world: World) -> tuple[torch.Tensor, ...]:
    return tuple(part.chunk(world.world_size())[world.rank()] for part in batch(SIZE))


def _odd(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """5 rows, of which 2 ranks have 3 and 2, and one row, which only rank 0 has."""
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).to(dtype)


def test_accumulation_gathers_parameters_once_where_asked() -> None:
    def work(world: World, keeps: bool) -> Any:
        torch.manual_seed(0)
        model = FSDP(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), strategy=ShardingStrategy.SHARD_GRAD_OP)
        optimizer = model.optimizer(torch.optim.AdamW, lr=0.1)
        gathers = []
        for step in range(3):
            with axon_nb.calls() as counted:
                for number in range(4):
                    if keeps:
                        model.module.set_reshard_after_backward(number == 3)  # type: ignore[operator]
                    model(torch.ones(2, 8) * (number + step + world.rank())).square().mean().backward()
                model.clip_grad_norm(1.0)
                optimizer.step()
                optimizer.zero_grad()
            gathers.append(counted.of("all_gather").calls)
        return gathers, model.full_state_dict()

    (often, expected), (once, found) = (World.mock(2).run(work, keeps)[0] for keeps in (False, True))
    assert (often, once) == ([12] * 3, [3] * 3)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    "strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD, S.OPTIMIZER_STATE], ids=lambda s: s.name
)
def test_gathered_gives_full_parameters_and_keeps_changes(two: Any, strategy: S) -> None:
    def work(world: World) -> Any:
        model = FSDP(_odd(), world, strategy=strategy)
        with model.gathered() as same:
            shapes = [tuple(p.shape) for p in same.parameters()]
            seen = [p.detach().clone() for p in same.parameters()]
            with torch.no_grad():
                same.get_parameter("0.weight")[4] = 7.0
                same.get_parameter("1.bias").zero_()
                out = model(torch.ones(1, 3, dtype=torch.float64)) - model.module(
                    torch.zeros(1, 3, dtype=torch.float64)
                )
        after = model.full_state_dict()
        model.gather_parameters()
        model.get_parameter("module.0.bias").data.fill_(2.0)
        model.reshard_parameters()
        return shapes, seen, out, after, model.full_state_dict()["0.bias"]

    reference = list(_odd().parameters())
    for shapes, seen, out, after, bias in two.run(work):
        assert shapes == [(5, 3), (5,), (1, 5), (1,)]
        assert all(map(torch.equal, seen, reference))
        assert torch.equal(after["0.weight"][:4], reference[0][:4])
        assert after["0.weight"][4].tolist() == [7.0] * 3
        torch.testing.assert_close(out, (after["1.weight"] @ after["0.weight"].sum(1)).view(1, 1))
        assert torch.equal(after["1.weight"], reference[2])
        assert (after["1.bias"].item(), bias.tolist()) == (0.0, [2.0] * 5)


@pytest.mark.parametrize("strategy", S, ids=lambda s: s.name)
def test_full_states_round_trip(four: Any, strategy: S) -> None:
    def work(world: World) -> Any:
        model = _fsdp(world, strategy, _odd())
        state = {name: value + 1 for name, value in model.full_state_dict().items()}
        model(torch.ones(1, 3, dtype=torch.float64))
        model.load_full_state_dict(state)
        with pytest.raises(UsageError, match="new is only in the state"):
            model.load_full_state_dict(state | {"new": torch.ones(1)})
        with pytest.raises(UsageError, match=r"0.bias has shape \(5,\) in the model and \(1,\) in the state"):
            model.load_full_state_dict(state | {"0.bias": torch.ones(1)})
        return model.full_state_dict(), model(torch.ones(1, 3, dtype=torch.float64))

    reference = _odd()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(1)
    for state, output in four.run(work):
        assert all(torch.equal(state[name], value) for name, value in reference.state_dict().items())
        torch.testing.assert_close(output, reference(torch.ones(1, 3, dtype=torch.float64)))


def test_unchanged_values_keep_their_precision(two: Any) -> None:
    def work(world: World) -> Any:
        model = FSDP(_odd(torch.float32), world, mixed_precision=torch.bfloat16)
        with model.gathered() as same, torch.no_grad():
            dtype = same.get_parameter("0.weight").dtype
            same.get_parameter("0.weight")[0, 0] = 0.5
        return dtype, model.full_state_dict()["0.weight"]

    expected = _odd(torch.float32)[0].weight.detach().clone()
    expected[0, 0] = 0.5
    for dtype, weight in two.run(work):
        assert dtype is torch.bfloat16
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("strategy", S, ids=lambda s: s.name)
def test_forward_before_the_step_changes_nothing(four: Any, strategy: S) -> None:
    def work(world: World, look: bool) -> Any:
        model = _fsdp(world, strategy)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        x, y = _batch(world)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            if look:
                with torch.no_grad():
                    model(x)
                model.gather_parameters()
            optimizer.step()
            if look:
                with model.gathered(), torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.0)
        return model.full_state_dict()

    for plain, looked in zip(four.run(work, False), four.run(work, True), strict=True):
        assert all(torch.equal(plain[name], value) for name, value in looked.items())


def test_stepped_shards_take_precedence_over_gathered_values(two: Any) -> None:
    def work(world: World, gather: bool) -> Any:
        model = FSDP(blocks(), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # knows nothing of what is gathered
        x, y = _batch(world)
        loss_of(model(x), y).backward()
        if gather:
            model.gather_parameters()
        optimizer.step()
        model.reshard_parameters()
        return model.full_state_dict()

    for plain, gathered in zip(two.run(work, False), two.run(work, True), strict=True):
        assert all(torch.equal(plain[name], value) for name, value in gathered.items())
