"""Muon on sharded matrices takes the same steps as `torch.optim.Muon` on whole ones, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from axon_nb.comm import InvalidArgumentError, World, all_gather
from axon_nb.parallel import Experts, Muon, declare_placements, make_mesh

OPTIONS = [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}]


def _model() -> nn.Sequential:
    # Wide, tall, square, and fewer rows than ranks.
    torch.manual_seed(0)
    sizes = [7, 33, 5, 64, 3, 3]
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any = None) -> None:
    for seed in range(3):
        x = torch.randn(16, 7, generator=torch.Generator().manual_seed(seed))
        if mesh is not None:
            x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim)
        optimizer.zero_grad()
        (model(x) ** 2).sum().backward()
        optimizer.step()


def _sharded(layout: str, size: int) -> tuple[nn.Sequential, Any]:
    model = _model()
    if layout == "FSDP2":
        return fully_shard(model), None
    if layout == "HSDP":
        return fully_shard(model, mesh=make_mesh(dp=2, tp=size // 2)), None
    mesh = init_device_mesh("cpu", (size,) if layout == "columns" else (2, size // 2))
    placements = [Shard(1)] if layout == "columns" else [Shard(0), Shard(1)]
    for layer in model:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, placements))
    return model, mesh


def _steps(world: World, layouts: list[str], options: dict[str, Any]) -> list[list[torch.Tensor]]:
    found = []
    for layout in layouts:
        model, mesh = _sharded(layout, world.world_size())
        optimizer = Muon(model.parameters(), lr=0.02, **options)
        _train(model, optimizer, mesh)
        found.append([parameter.full_tensor() for parameter in model.parameters()])
        states = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
        assert all(
            state.to_local().shape == parameter.to_local().shape
            for state, parameter in zip(states, model.parameters(), strict=True)
        )
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=["nesterov", "plain"])
def test_steps_equal_those_on_whole_matrices(four: Any, options: dict[str, Any]) -> None:
    whole = _model()
    _train(whole, torch.optim.Muon(whole.parameters(), lr=0.02, **options))
    for results in four.run(_steps, ["FSDP2", "HSDP", "columns", "both"], options):
        for found in results:
            for first, second in zip(found, whole.parameters(), strict=True):
                assert torch.equal(first, second)


def test_parts_of_plain_tensors_and_stacks_of_experts_are_whole_matrices(two: Any) -> None:
    def work(world: World) -> Any:
        start = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
        gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
        part = declare_placements(nn.Parameter(start.chunk(2)[world.rank()].clone()), make_mesh(tp=2), [Shard(0)])
        part.grad = gradient.chunk(2)[world.rank()].clone()
        layer = Experts(4, 6, 4, seed=1)
        layer(torch.randn(8, 4, generator=torch.Generator().manual_seed(world.rank()))).sum().backward()
        before, of_experts = all_gather(layer.up.detach().clone()), all_gather(layer.up.grad)
        Muon([part, layer.up], lr=0.1).step()
        return all_gather(part.detach()), start, gradient, all_gather(layer.up.detach()), before, of_experts

    for part, start, gradient, experts, before, of_experts in two.run(work):
        for found, whole, given in [(part, start, gradient), *zip(experts, before, of_experts, strict=True)]:
            parameter = nn.Parameter(whole.clone())
            parameter.grad = given
            torch.optim.Muon([parameter], lr=0.1).step()
            assert torch.equal(found, parameter)


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_of_bfloat16_is_the_mean_of_the_gradients(nesterov: bool) -> None:
    # torch's loses it without nesterov: findings/muon-in-bfloat16-forgets-its-momentum.sh.
    weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    optimizer = Muon([weight], lr=0.1, momentum=0.5, nesterov=nesterov)
    for share in (0.5, 0.75):
        weight.grad = torch.full((4, 4), 8.0, dtype=torch.bfloat16)
        optimizer.step()
        assert torch.equal(optimizer.state[weight]["momentum_buffer"], weight.grad * share)


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"shape \(3,\)"):
        Muon([nn.Parameter(torch.zeros(3))])
    with pytest.raises(InvalidArgumentError, match="momentum 0 to 1"):
        Muon([nn.Parameter(torch.zeros(3, 3))], momentum=2.0)
    with pytest.raises(InvalidArgumentError, match="original or match_rms_adamw"):
        Muon([nn.Parameter(torch.zeros(3, 3))], adjust_lr_fn="mine")
