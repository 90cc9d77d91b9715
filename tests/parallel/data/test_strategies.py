"""Every strategy equals one process, and full parameters are read, changed, saved and loaded between steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import axon_nb
from axon_nb.comm import World
from axon_nb.comm.collectives.reduction import all_reduce_mean
from axon_nb.errors import UsageError
from axon_nb.parallel import FSDP, CPUOffload, ShardingStrategy, checkpoint_blocks, make_mesh
from axon_nb.parallel.data.units import full_value
from tests.support.ranks import RankWorld
from tests.support.training.models import Block, batch, blocks, loss_of

S = ShardingStrategy
WIDTH = 5
"""5 and 10 rows: of the former, the last of 4 ranks has none."""
SIZE = 48
VARIANTS = [
    "plain",
    "accumulated",
    "checkpointed",
    "wrapped by size",
    CPUOffload.PARAMS,
    CPUOffload.OPTIMIZER_STATES,
    CPUOffload.FULL,
]
Result = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def _model(dtype: torch.dtype) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(8)
        head = nn.Linear(WIDTH, 3)
    return nn.Sequential(*blocks(3, WIDTH), nn.Dropout(0.0), head).to(dtype)


def _data(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(SIZE, WIDTH)
    return x.to(dtype), y[:, :3].to(dtype)


def _reference(dtype: torch.dtype, steps: int = 3) -> Result:
    model = _model(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    losses, gradients = [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(_data(dtype)[0]), _data(dtype)[1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        losses.append(loss.item())
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, gradients, {name: value.detach() for name, value in model.state_dict().items()}


def _train(world: World, strategy: S, variant: Any, dtype: torch.dtype, steps: int = 3, **options: Any) -> Result:
    ranks = world.world_size()
    module = _model(dtype)
    if world.rank():
        nn.init.zeros_(module[-1].weight)  # what rank 0 has is sent to all
    if variant == "checkpointed":
        assert checkpoint_blocks(module, Block) == 3
    if isinstance(variant, CPUOffload):
        options["cpu_offload"] = variant
    mesh = make_mesh(replicate=2, shard=-1, device="cpu") if strategy is S.HYBRID_SHARD else None
    wrap: Any = 60 if variant == "wrapped by size" else Block
    model = FSDP(module, None if mesh else world, strategy=strategy, mesh=mesh, wrap=wrap, **options)
    optimizer = model.optimizer(torch.optim.Adam, lr=0.01, eps=1e-3)
    x, y = (part.chunk(ranks)[world.rank()] for part in _data(dtype))
    pieces = 3 if variant == "accumulated" else 1
    losses, gradients = [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for number, (inputs, targets) in enumerate(zip(x.chunk(pieces), y.chunk(pieces), strict=True)):
            if number + 1 < pieces:
                with model.no_sync():
                    loss = loss_of(model(inputs), targets) / pieces
                    loss.backward()
            else:
                loss = loss_of(model(inputs), targets) / pieces
                loss.backward()
            total += loss.detach()
        model.sync_gradients()
        model.clip_grad_norm(0.5)
        losses.append(float(all_reduce_mean(total)))
        gradients = {name: full_value(p.grad) for name, p in model.module.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, gradients, model.full_state_dict()


def _compare(found: Result, expected: Result, tolerance: float) -> None:
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    for tensors, references in zip(found[1:], expected[1:], strict=True):
        assert set(tensors) == set(references)
        for name, tensor in tensors.items():
            error = (tensor - references[name]).abs().max() / references[name].abs().max()
            assert error <= tolerance, f"{name}: {error:.1e}"


def _variants(strategy: S) -> list[Any]:
    return [v for v in VARIANTS if strategy is not S.OPTIMIZER_STATE or v not in (CPUOffload.PARAMS, CPUOffload.FULL)]


CASES = [(2, strategy) for strategy in S if strategy is not S.HYBRID_SHARD] + [(4, strategy) for strategy in S]


@pytest.mark.parametrize(("ranks", "strategy"), CASES, ids=lambda value: getattr(value, "name", value))
def test_losses_gradients_and_weights_in_float64(gloo: Any, ranks: int, strategy: S) -> None:
    def work(world: World) -> list[Result]:
        return [_train(world, strategy, variant, torch.float64) for variant in _variants(strategy)]

    expected = _reference(torch.float64)
    for results in gloo(ranks).run(work):
        for result in results:
            _compare(result, expected, 1e-10)


@pytest.mark.parametrize("strategy", S, ids=lambda s: s.name)
def test_losses_gradients_and_weights_in_float32(gloo: Any, strategy: S) -> None:
    def work(world: World) -> Result:
        return _train(world, strategy, "plain", torch.float32)

    expected = _reference(torch.float32)
    for result in gloo(4).run(work):
        _compare(result, expected, 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", S, ids=lambda s: s.name)
def test_losses_gradients_and_weights_on_8_ranks(eight: RankWorld, strategy: S) -> None:
    def work(world: World) -> list[Result]:
        return [_train(world, strategy, variant, torch.float64) for variant in _variants(strategy)[::2]]

    expected = _reference(torch.float64)
    for results in eight.run(work):
        for result in results:
            _compare(result, expected, 1e-10)


@pytest.fixture(scope="module")
def eight() -> Any:
    """Eight processes."""
    with RankWorld(8) as world:
        yield world


BFLOAT16 = {
    "reduced in float32": torch.bfloat16,
    "reduced in bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "float32 outputs": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    ),
}


@pytest.mark.parametrize("policy", BFLOAT16)
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.HYBRID_SHARD, S.NO_SHARD], ids=lambda s: s.name)
def test_bfloat16_error_is_within_its_precision(gloo: Any, strategy: S, policy: str) -> None:
    """About 20 operations deep with a rounding error of 2 ** -9 each: 0.04 of the largest gradient."""

    def work(world: World) -> Any:
        result = _train(world, strategy, "plain", torch.float32, 1, mixed_precision=BFLOAT16[policy])
        return result, {value.dtype for value in result[2].values()}

    expected = _reference(torch.float32, 1)
    for (losses, gradients, _), dtypes in gloo(4).run(work):
        assert dtypes == {torch.float32}
        _compare((losses, gradients, {}), (*expected[:2], {}), 0.04)


@pytest.mark.parametrize("offload", CPUOffload, ids=lambda o: o.name)
def test_training_resumes_from_saved_states(gloo: Any, offload: CPUOffload) -> None:
    def work(world: World) -> Any:
        x, y = (part.chunk(2)[world.rank()] for part in _data(torch.float64))

        def make() -> tuple[FSDP, torch.optim.Optimizer]:
            model = FSDP(_model(torch.float64), world, wrap=Block, cpu_offload=offload)
            return model, model.optimizer(torch.optim.Adam, lr=0.01)

        def step(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()

        first, second = make(), make()
        step(*first)
        step(*first)
        second[0].load_full_state_dict(first[0].full_state_dict())
        second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
        for pair in (first, second):
            step(*pair)
        return first[0].full_state_dict(), second[0].full_state_dict()

    for first, second in gloo(2).run(work):
        assert all(torch.equal(first[name], value) for name, value in second.items())


GATHERED = 12


def _fsdp(world: World, strategy: S, model: nn.Module | None = None) -> FSDP:
    mesh = make_mesh(replicate=2, shard=-1, device="cpu") if strategy is S.HYBRID_SHARD else None
    return FSDP(model or blocks(), None if mesh else world, strategy=strategy, mesh=mesh)


def _batch(world: World) -> tuple[torch.Tensor, ...]:
    return tuple(part.chunk(world.world_size())[world.rank()] for part in batch(GATHERED))


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
