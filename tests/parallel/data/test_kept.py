"""Stage 2 as the ZeRO paper has it: gathered parameters stay until a shard has changed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import axon_nb
from axon_nb.comm import World
from axon_nb.errors import UsageError
from axon_nb.parallel import FSDP, CPUOffload, ShardingStrategy

STAGE_2 = ShardingStrategy.SHARD_GRAD_OP


def _model(world: World, **options: Any) -> FSDP:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 1))  # of the last, one rank has nothing
    return FSDP(layers, world, strategy=STAGE_2, **options)


def _trained(world: World, **options: Any) -> Any:
    model, gathers = _model(world, **options), []
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.1)
    for step in range(3):
        with axon_nb.calls() as counted:
            for number in range(4):
                model(torch.ones(2, 8) * (number + step + world.rank())).square().mean().backward()
            model.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
        with axon_nb.calls() as idle, torch.no_grad():
            seen = [model(torch.ones(1, 8)) for _ in range(3)][-1]
        gathers.append((counted.of("all_gather").calls, idle.of("all_gather").calls))
    return gathers, model.full_state_dict(), seen


@pytest.mark.parametrize("options", [{}, {"mixed_precision": torch.bfloat16}], ids=["float32", "bfloat16"])
def test_steps_equal_those_of_torchs_stage_2_and_gather_once_each(options: dict[str, Any]) -> None:
    both = [World.mock(2).run(functools.partial(_trained, **options, **more)) for more in ({}, {"keep_whole": True})]
    for expected, (gathers, state, seen) in zip(*both, strict=True):
        # Four units. The first step gathers them; afterwards the first forward without gradients does.
        assert gathers == [(4, 4), (0, 4), (0, 4)]
        assert min(min(pair) for pair in expected[0]) >= 4
        assert sum(map(sum, expected[0])) > 4 * 12
        assert all(torch.equal(state[name], value) for name, value in expected[1].items())
        assert torch.equal(seen, expected[2])


def test_whatever_changes_shards_is_seen(two: Any) -> None:
    def work(world: World, options: dict[str, Any]) -> list[torch.Tensor]:
        model, x = _model(world, **options), torch.ones(1, 8)
        seen = [model(x)]
        model.reshard_parameters()
        if world.rank() == 0:
            next(model.parameters()).to_local().data.mul_(2)  # on one rank, and past version counters
        seen.append(model(x))
        with model.gathered() as whole, torch.no_grad():
            whole[1].weight.zero_()
        seen.append(model(x))
        model.load_full_state_dict({name: value + 1 for name, value in model.full_state_dict().items()})
        with model.gathered() as whole:
            seen.append(whole[3].weight.detach().clone())
        return [one.detach() for one in (*seen, model(x))]

    for kept, plain in zip(two.run(work, {"keep_whole": True}), two.run(work, {}), strict=True):
        assert len({float(one.sum()) for one in plain}) == 5
        assert all(map(torch.equal, kept, plain))


def test_a_failed_forward_leaves_nothing_wrong_behind(two: Any) -> None:
    def work(world: World) -> Any:
        model, x = _model(world, keep_whole=True), torch.ones(1, 8)
        expected = model(x).detach()
        with torch.no_grad():
            next(model.parameters()).add_(1)

        def fail(*_: Any) -> None:
            raise ValueError("bug")

        last = model.module[3].register_forward_hook(fail) if world.rank() else None
        try:
            changed = model(x).detach()
        except ValueError:
            assert last is not None
            last.remove()
            changed = None
        again = model(x).detach()
        return expected, changed, again

    (expected, changed, again), (_, failed, other) = two.run(work)
    assert failed is None
    assert not torch.equal(expected, changed)
    assert torch.equal(changed, again)
    assert torch.equal(again, other)


def test_memory_is_counted(two: Any) -> None:
    def work(world: World) -> Any:
        model = _model(world, keep_whole=True)
        optimizer = model.optimizer(torch.optim.AdamW)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        return (
            model.memory_stats().total_bytes,
            model.memory_estimate().total_bytes,
            model.memory_estimate().total_params,
        )

    for measured, estimated, elements in two.run(work):
        assert measured == estimated
        assert measured > 4 * elements + 16 / 2 * (elements - 9), "whole parameters, and shards of everything"


@pytest.mark.parametrize(
    "options",
    [{"strategy": ShardingStrategy.FULL_SHARD}, {"strategy": STAGE_2, "cpu_offload": CPUOffload.PARAMS}],
)
def test_what_it_needs_is_said(options: dict[str, Any]) -> None:
    def work(_: World) -> str:
        with pytest.raises(UsageError) as raised:
            FSDP(nn.Linear(2, 2), keep_whole=True, **options)
        return str(raised.value)

    assert "strategy=ShardingStrategy.SHARD_GRAD_OP" in World.mock(1).run(work)[0]
