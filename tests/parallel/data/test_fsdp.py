"""FSDP against a single process, for every strategy: weights, norms, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from axon_nb.comm import World
from axon_nb.errors import UsageError
from axon_nb.parallel import FSDP, CPUOffload, ShardingStrategy, make_mesh
from axon_nb.parallel.data.units import make_units
from tests.support.training.models import Block, batch, blocks, loss_of

S = ShardingStrategy
SIZE = 12


def _fsdp(world: World, strategy: S, **options: Any) -> FSDP:
    mesh = make_mesh(replicate=2, shard=-1, device="cpu") if strategy is S.HYBRID_SHARD else None
    return FSDP(blocks(), None if mesh else world, strategy=strategy, mesh=mesh, **options)


def _batch(world: World) -> tuple[torch.Tensor, ...]:
    count = SIZE // world.world_size()
    own = slice(world.rank() * count, (world.rank() + 1) * count)
    return tuple(part[own] for part in batch(SIZE))


def _reference(steps: int = 3, max_norm: float = 0.1) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = blocks()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    norms = []
    for _ in range(steps):
        x, y = batch(SIZE)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}, norms


STRATEGIES = list(S)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_weights_and_norms_match_one_process(four: Any, strategy: S) -> None:
    def work(world: World) -> Any:
        model = _fsdp(world, strategy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        x, y = _batch(world)
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            model.sync_gradients()
            norms.append(model.clip_grad_norm(0.1))
            optimizer.step()
        return model.full_state_dict(), norms

    weights, norms = _reference()
    for state, own_norms in four.run(work):
        assert own_norms == pytest.approx(norms, rel=1e-10)
        assert set(state) == set(weights)
        for name, value in state.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-9, atol=1e-10)


def test_accumulation_within_no_sync(two: Any) -> None:
    def work(world: World) -> Any:
        model = FSDP(blocks(), world, wrap=Block)
        x, y = _batch(world)
        with model.no_sync():
            (loss_of(model(x[:3]), y[:3]) / 2).backward()
        with pytest.raises(UsageError, match="run the last micro-batch's backward outside of no_sync"):
            model.sync_gradients()
        (loss_of(model(x[3:]), y[3:]) / 2).backward()
        model.sync_gradients()
        return model.clip_grad_norm(1e9)

    model = blocks()
    x, y = batch(SIZE)
    loss_of(model(x), y).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    assert two.run(work) == pytest.approx([expected] * 2, rel=1e-10)


def _is_up(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features > module.in_features


@pytest.mark.parametrize(
    "wrap", [None, Block, (nn.Linear,), _is_up, 100, 10**9], ids=["none", "class", "classes", "function", "100", "all"]
)
def test_every_way_to_wrap_gives_the_same_gradients(two: Any, wrap: Any) -> None:
    def work(world: World) -> Any:
        model = FSDP(blocks(), world, wrap=wrap)
        x, y = _batch(world)
        loss_of(model(x), y).backward()
        return model.clip_grad_norm(1e9), sum(isinstance(unit, FSDPModule) for unit in model.modules())

    units = {None: 5, Block: 5, (nn.Linear,): 9, _is_up: 5, 100: 9, 10**9: 1}[wrap]
    answers = two.run(work)
    assert {count for _, count in answers} == {units}
    model = blocks()
    x, y = batch(SIZE)
    loss_of(model(x), y).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    assert [own for own, _ in answers] == pytest.approx([norm] * 2, rel=1e-10)


def test_mixed_precision_and_offload_train(two: Any) -> None:
    """Offloading changes no bit, and bfloat16 changes few: parameters stay float32. `tests/gpu` says what is where."""

    def trained(world: World, **options: Any) -> Any:
        losses, seen = [], set()
        model = FSDP(blocks().float(), world, wrap=Block, **options)
        for block in model.modules():
            if isinstance(block, Block):
                block.up.register_forward_hook(
                    lambda module, args, output: seen.add((module.weight.dtype, output.dtype))
                )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = (part.float() for part in _batch(world))
        for _ in range(5):
            optimizer.zero_grad()
            loss = loss_of(model(x).float(), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        held = {parameter.dtype for parameter in model.parameters()}
        return losses, model.full_state_dict(), seen, held

    def work(world: World) -> Any:
        low = torch.bfloat16
        return (
            trained(world),
            trained(world, mixed_precision=low),
            trained(world, mixed_precision=low, cpu_offload=CPUOffload.FULL),
        )

    for plain, mixed, offloaded in two.run(work):
        assert plain[2:] == ({(torch.float32, torch.float32)}, {torch.float32})
        assert mixed[2:] == offloaded[2:] == ({(torch.bfloat16, torch.bfloat16)}, {torch.float32})
        assert offloaded[0] == mixed[0] != plain[0]
        assert mixed[0] == pytest.approx(plain[0], rel=0.02)
        assert mixed[0][-1] < mixed[0][0]
        assert all(torch.equal(value, mixed[1][name]) for name, value in offloaded[1].items())


def _tied() -> nn.Sequential:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), *blocks(2), nn.Linear(8, 8)).double()
    model[-1].weight = model[0].weight
    return model


def test_shared_parameter_stays_shared(two: Any) -> None:
    def work(world: World) -> Any:
        found = []
        for strategy in (S.FULL_SHARD, S.NO_SHARD, S.OPTIMIZER_STATE):
            model = FSDP(_tied(), world, strategy=strategy)
            optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
            x, y = _batch(world)
            loss_of(model(x), y).backward()
            norm = model.clip_grad_norm(0.1)
            optimizer.step()
            state = model.full_state_dict()
            assert torch.equal(state["0.weight"], state["3.weight"])
            found.append((norm, state["0.weight"], len(list(model.parameters()))))
        return found

    model = _tied()
    x, y = batch(SIZE)
    loss_of(model(x), y).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for found in two.run(work):
        for norm, weight, count in found:
            assert (norm, count) == (pytest.approx(expected, rel=1e-10), 10)
            torch.testing.assert_close(weight, model[0].weight.detach(), rtol=1e-10, atol=1e-12)


def test_blocks_of_a_list_are_units() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(blocks(3))
            self.tails = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.ReLU()})

    model = Listed()
    each = [*model.layers, model.tails["a"]]
    assert make_units(model, None) == each
    assert make_units(model, 72) == [part for layer in model.layers for part in (layer.up, layer.down)] + each[3:]
    assert make_units(model, 200) == each[:3]
    assert make_units(model, lambda module: not list(module.parameters(recurse=False))) == [
        model.tails["b"],
        *each[2::-1],
    ]


def test_invalid_arguments_raise() -> None:
    def work(world: World) -> list[str]:
        reported = []
        line = make_mesh(a=-1, device="cpu")
        cases: list[dict[str, Any]] = [
            {"strategy": S.HYBRID_SHARD},
            {"strategy": S.HYBRID_SHARD, "mesh": line},
            {"strategy": "half_shard"},
            {"group": world, "mesh": line},
            {"wrap": 0},
            {"strategy": S.OPTIMIZER_STATE, "cpu_offload": CPUOffload.FULL},
            {"strategy": S.OPTIMIZER_STATE, "mixed_precision": torch.bfloat16},
            {"strategy": S.OPTIMIZER_STATE, "mesh": make_mesh(a=2, b=1, device="cpu")},
        ]
        for options in cases:
            try:
                FSDP(blocks(), **options)
            except UsageError as error:
                reported.append(str(error))
        return reported

    class Own(FSDP):
        """A subclass without a registered strategy."""

    with pytest.raises(UsageError, match="Own cannot use OPTIMIZER_STATE; derive it from ZeRO1"):
        Own(blocks(), strategy=S.OPTIMIZER_STATE)
    for reported in World.mock(2).run(work):
        assert reported == [
            "HYBRID_SHARD needs a mesh of (replicas, shards), such as make_mesh(replicate=2, shard=-1).",
            "HYBRID_SHARD needs a 2-D mesh; got a 1-D one.",
            (
                "strategy must be one of ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, "
                "ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD, ShardingStrategy.OPTIMIZER_STATE; "
                "got 'half_shard'."
            ),
            "Pass either group or mesh, not both: the mesh already defines the ranks.",
            "wrap must be at least 1 parameter; got 0.",
            (
                "ZeRO-1 does not support CPUOffload.FULL, as its parameters are not sharded; use OPTIMIZER_STATES, or "
                "FULL_SHARD to offload parameters."
            ),
            "ZeRO-1 does not support mixed_precision=torch.bfloat16; use torch.autocast around the forward.",
            "OPTIMIZER_STATE needs a 1-D mesh; got a 2-D one.",
        ]
