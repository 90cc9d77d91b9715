"""The gradient norm equals that of a single process, for every layout of the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from axon_nb.comm import World
from axon_nb.errors import UsageError
from axon_nb.parallel import (
    DDP,
    FSDP,
    ColumnParallelLinear,
    NonFiniteNormError,
    RowParallelLinear,
    ShardingStrategy,
    ZeRO1,
    clip_grad_norm,
    declare_placements,
    grad_norm,
    make_mesh,
)
from tests.support.ranks import RankWorld
from tests.support.training.models import Block, batch, blocks, loss_of

ORDERS = [2.0, 1.0, 3.0, math.inf]
SIZE = 24


def _model(count: int = 2, width: int = 8) -> nn.Sequential:
    """Blocks and a norm, which tensor parallelism does not shard; 8 * 2 rows, and 9 that are not divisible."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        parts = blocks(count, width)
        head = nn.Linear(width, 9).double()
        return nn.Sequential(*parts, nn.Identity(), nn.LayerNorm(width).double(), head)


def _loss(output: torch.Tensor) -> torch.Tensor:
    return loss_of(output, torch.arange(9.0, dtype=torch.float64))


def _part(index: int, ranks: int) -> torch.Tensor:
    return batch(SIZE)[0].chunk(ranks)[index]


def _reference(order: float) -> float:
    model = _model()
    _loss(model(batch(SIZE)[0])).backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], order))


def _train(model: nn.Module, index: int, ranks: int) -> nn.Module:
    _loss(model(_part(index, ranks))).backward()
    return model


def _own_layers(model: nn.Sequential, group: Any) -> nn.Sequential:
    for block in model:
        if isinstance(block, Block):
            block.up = ColumnParallelLinear.from_linear(block.up, group=group)
            block.down = RowParallelLinear.from_linear(block.down, group=group)
    return model


def _dtensor_layers(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    for block in model:
        if isinstance(block, Block):
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _sequence_parallel(mesh: Any) -> nn.Sequential:
    cut = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0), use_local_output=False)
    head = ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
    plan = {"2": cut, "3": SequenceParallel(sequence_dim=0), "4": head}
    model: nn.Sequential = parallelize_module(_dtensor_layers(_model(), mesh), mesh, plan)
    return model


def _stage(index: int, stages: int) -> nn.Module:
    """A fake pipeline stage after backward: gradients of its layers over the whole batch."""
    model = _train(_model(), 0, 1)
    return nn.Sequential(*list(model)[index::stages])


def _fsdp(world: World, strategy: ShardingStrategy) -> tuple[nn.Module, Any]:
    mesh = None
    if strategy is ShardingStrategy.HYBRID_SHARD:
        mesh = make_mesh(replicate=2, shard=-1, device="cpu")
    return _train(FSDP(_model(), strategy=strategy, mesh=mesh), world.rank(), world.world_size()), ()


def _fsdp_and_tp(world: World, own: bool) -> tuple[nn.Module, Any]:
    mesh = make_mesh(dp=-1, tp=2, device="cpu")
    tp, dp = mesh["tp"], mesh["dp"]
    model = _own_layers(_model(), tp.get_group()) if own else _dtensor_layers(_model(), tp)
    return _train(FSDP(model, mesh=dp, wrap=Block), dp.get_local_rank(), dp.size()), ()


def _pipeline(world: World) -> tuple[nn.Module, Any]:
    return _stage(world.rank(), world.world_size()), make_mesh(pp=-1, device="cpu")["pp"]


LAYOUTS: dict[str, Callable[[World], tuple[Any, Any]]] = {
    "DDP": lambda world: (_train(DDP(_model(), world), world.rank(), world.world_size()), ()),
    "ZeRO-1": lambda world: (_train(ZeRO1(_model(), world), world.rank(), world.world_size()), ()),
    **{s.name: lambda world, s=s: _fsdp(world, s) for s in ShardingStrategy},
    "own layers": lambda world: (_train(_own_layers(_model(), None), 0, 1), ()),
    "DTensor": lambda world: (_train(_dtensor_layers(_model(), make_mesh(tp=-1, device="cpu")), 0, 1), ()),
    "sequence parallel": lambda world: (_train(_sequence_parallel(make_mesh(tp=-1, device="cpu")), 0, 1), ()),
    "FSDP + own layers": lambda world: _fsdp_and_tp(world, True),
    "FSDP + DTensor": lambda world: _fsdp_and_tp(world, False),
    "pipeline": _pipeline,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_norm_matches_one_process(gloo: Any, ranks: int, layout: str) -> None:
    def work(world: World) -> Any:
        model, groups = LAYOUTS[layout](world)
        norms = [grad_norm(model, norm_type=order, groups=groups) for order in ORDERS]
        reported = clip_grad_norm(model, 0.1, groups=groups)
        return norms, reported, grad_norm(model, groups=groups)

    expected = [_reference(order) for order in ORDERS]
    for norms, reported, after in gloo(ranks).run(work):
        assert norms == pytest.approx(expected, rel=1e-10)
        assert reported == pytest.approx(expected[0], rel=1e-10)
        assert after == pytest.approx(0.1 * expected[0] / (expected[0] + 1e-6), rel=1e-9)


@pytest.mark.slow
def test_stages_of_sharded_and_tensor_parallel_blocks_on_8_ranks() -> None:
    def work(world: World) -> Any:
        mesh = make_mesh(pp=2, dp=2, tp=2, device="cpu")
        stage, dp = mesh["pp"].get_local_rank(), mesh["dp"]
        inputs = batch(SIZE)[0]
        first, last = _model()[:1], _model()[1:]
        middle = first(inputs).detach().requires_grad_()
        _loss(last(middle)).backward()
        assert middle.grad is not None
        own: nn.Sequential = (_model()[:1], _model()[1:])[stage]
        model = FSDP(_dtensor_layers(own, mesh["tp"]), mesh=dp, wrap=Block)
        index = dp.get_local_rank()
        if stage == 1:
            _loss(model(middle.detach().chunk(2)[index])).backward()
        else:
            model(inputs.chunk(2)[index]).backward(middle.grad.chunk(2)[index] * 2)
        return [grad_norm(model, norm_type=order, groups=mesh["pp"]) for order in ORDERS]

    expected = [_reference(order) for order in ORDERS]
    with RankWorld(8) as world:
        for norms in world.run(work):
            assert norms == pytest.approx(expected, rel=1e-10)


def test_small_gradients_are_unchanged_and_nan_raises() -> None:
    model = nn.Linear(3, 2)
    model.weight.grad = torch.full((2, 3), 0.1)
    assert clip_grad_norm(model, 10.0) == pytest.approx(0.1 * math.sqrt(6))
    assert torch.equal(model.weight.grad, torch.full((2, 3), 0.1))
    assert clip_grad_norm(model.parameters(), 0.01) == pytest.approx(0.1 * math.sqrt(6))
    assert grad_norm(model) == pytest.approx(0.01, rel=1e-4)
    model.weight.grad[0, 0] = math.nan
    with pytest.raises(NonFiniteNormError, match="The gradient norm is nan, so the gradients cannot be clipped"):
        clip_grad_norm(model, 1.0, error_if_nonfinite=True)
    assert math.isnan(clip_grad_norm(model, 1.0))
    assert model.weight.grad.isnan().all()
    with pytest.raises(UsageError, match=r"norm_type must be positive or math\.inf; got 0"):
        grad_norm(model, norm_type=0)


def test_nan_of_any_rank_is_in_the_largest_norm(gloo: Any) -> None:
    def work(world: World) -> list[float]:
        parameter, three = nn.Parameter(torch.zeros(3)), torch.distributed.new_group([0, 1, 2], backend="gloo")
        norms = []
        for with_nan in (0, 1, 2, None) if world.rank() < 3 else ():
            parameter.grad = torch.full((3,), math.nan if world.rank() == with_nan else 1.0 + world.rank())
            norms.append(grad_norm([parameter], norm_type=math.inf, groups=three))
        return norms

    for *norms, whole in gloo(4).run(work)[:3]:
        assert all(map(math.isnan, norms)), norms
        assert whole == 3.0


def test_bfloat16_is_summed_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(10_000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.01)
    exact = float(parameter.grad.double().norm())
    assert grad_norm([parameter]) == pytest.approx(exact, rel=1e-6)


def test_plain_tensors_with_declared_placements(two: Any) -> None:
    whole = torch.arange(12.0, dtype=torch.float64).view(3, 4) - 5

    def work(world: World) -> tuple[float, list[float]]:
        mesh = make_mesh(tp=2, device="cpu")["tp"]
        part = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
        both = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        declare_placements(part, mesh, [Shard(1)])
        declare_placements(both, mesh, [Replicate()])
        part.grad, both.grad = whole.chunk(2, 1)[world.rank()].clone(), torch.ones(3, dtype=torch.float64)
        return clip_grad_norm([part, both], 1.0), [grad_norm([part, both])]

    expected = math.sqrt(float(whole.square().sum()) + 3)
    for norm, after in two.run(work):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert after == pytest.approx([1.0], rel=1e-5)
