"""Memory of each rank equals the formula to the byte, and released memory is really gone."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from axon_nb.comm import World
from axon_nb.errors import UsageError
from axon_nb.parallel import (
    FSDP,
    CPUOffload,
    OptimizerKind,
    ShardingStrategy,
    ZeRO1,
    checkpoint_blocks,
    make_mesh,
    model_states,
)
from axon_nb.parallel.models import GPT, Block, GPTConfig, next_byte_loss
from axon_nb.records.hooks import missing_hooks

S = ShardingStrategy
OPTIMIZERS: dict[str, Any] = {
    "Adam": torch.optim.Adam,
    "AMSGrad": partial(torch.optim.AdamW, amsgrad=True),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "Adagrad": torch.optim.Adagrad,
}


def _model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """7, 5 and 3 rows, which are not divisible by 4 ranks; the last bias is frozen."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    model[-1].bias.requires_grad_(False)
    return model


def _sharded(world: World, strategy: S, model: nn.Module, **options: Any) -> FSDP:
    mesh = make_mesh(replicate=2, shard=-1, device="cpu") if strategy is S.HYBRID_SHARD else None
    return FSDP(model, None if mesh else world, strategy=strategy, mesh=mesh, **options)


def _three(stats: Any) -> tuple[int, ...]:
    return stats.param_memory_bytes, stats.grad_memory_bytes, stats.optim_memory_bytes, stats.host_bytes


def _bytes_of_a_step(model: FSDP, kind: Any, dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...]]:
    optimizer = model.optimizer(kind)
    model(torch.ones(4, 6, dtype=dtype)).float().square().mean().backward()
    optimizer.step()
    return _three(model.memory_stats()), _three(model.memory_estimate())


@pytest.mark.parametrize("strategy", S, ids=lambda s: s.name)
def test_estimate_equals_measurement(gloo: Any, strategy: S) -> None:
    def work(world: World) -> Any:
        found = {}
        for name, kind in OPTIMIZERS.items():
            for dtype in (torch.float32, torch.bfloat16) if name == "Adam" else (torch.float32,):
                model = _sharded(world, strategy, _model(dtype))
                found[name, dtype] = _bytes_of_a_step(model, kind, dtype)
        if strategy is not S.OPTIMIZER_STATE:
            model = _sharded(world, strategy, _model(), mixed_precision=torch.bfloat16)
            found["mixed"] = _bytes_of_a_step(model, torch.optim.Adam, torch.float32)
        for offload in CPUOffload:
            if strategy is not S.OPTIMIZER_STATE or offload not in (CPUOffload.PARAMS, CPUOffload.FULL):
                model = _sharded(world, strategy, _model(), cpu_offload=offload)
                found[offload] = _bytes_of_a_step(model, torch.optim.Adam, torch.float32)
        return found

    for found in gloo(4).run(work):
        for case, (held, estimate) in found.items():
            assert held == estimate, case
        held = found[CPUOffload.NONE][0]
        if strategy is not S.OPTIMIZER_STATE:
            assert found[CPUOffload.PARAMS][0] == (*held[:3], held[0])
            assert found[CPUOffload.FULL][0] == (*held[:3], sum(held[:3]))
        assert found[CPUOffload.OPTIMIZER_STATES][0] == (*held[:3], held[2])


def test_parameter_groups_and_more_ranks_than_parameters(four: Any) -> None:
    def work(world: World) -> Any:
        model = ZeRO1(_model(), world)
        groups = [{"params": [p for p in model.parameters() if p.ndim == n], "lr": 0.1 * n} for n in (2, 1)]
        optimizer = model.optimizer(torch.optim.Adam, groups)
        model(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()
        few = ZeRO1(nn.Linear(3, 2), world)
        return (
            (_three(model.memory_stats()), _three(model.memory_estimate())),
            _bytes_of_a_step(FSDP(nn.Linear(6, 2), world, strategy=S.OPTIMIZER_STATE), torch.optim.Adam, torch.float32),
            few.memory_estimate().optim_memory_bytes,
        )

    results = four.run(work)
    for pair, few, _ in results:
        assert pair[0] == pair[1]
        assert few[0] == few[1]
    assert [states for *_, states in results] == [2 * 4 * 6, 2 * 4 * 2, 0, 0]


def test_tensor_parallel_shards_are_estimated(gloo: Any) -> None:
    def work(world: World) -> Any:
        mesh = make_mesh(dp=2, tp=2, device="cpu")
        model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return _bytes_of_a_step(FSDP(model, mesh=mesh["dp"]), torch.optim.Adam, torch.float32)

    # Of 66 + 70 elements: the bias of 6 is whole in tensor parallelism; 5 rows of 2 ranks are 3 and 2.
    for rank, (held, estimate) in enumerate(gloo(4).run(work)):
        assert held == estimate
        assert held[0] == 4 * (3 * 6 + 3 + 3 * 5 + 3)
        assert held[2] == 2 * 4 * ((18, 12)[rank // 2] + (3, 2)[rank // 2] + 15 + 3)


def test_formulas() -> None:
    # 5 rows over 4 ranks: 2, 2, 1 and none, padded to 2; a scalar is one row, on every rank.
    shapes: list[Any] = [((5, 3), torch.float32), ((), torch.float32)]
    stats = model_states(shapes, S.FULL_SHARD, world_size=4)
    assert (stats.total_params, stats.param_memory_bytes) == (16, (2 * 3 + 1) * 4)
    assert stats.optim_memory_bytes == 2 * stats.param_memory_bytes
    assert stats.memory_savings() == pytest.approx(1 - 7 / 16)
    last = model_states(shapes, S.FULL_SHARD, world_size=4, rank=3)
    assert (last.param_memory_bytes, last.optim_memory_bytes) == (28, 0)
    one = model_states([((8, 2), torch.bfloat16)], S.OPTIMIZER_STATE, world_size=4, state_dtype=torch.float32)
    assert (one.param_memory_bytes, one.grad_memory_bytes, one.optim_memory_bytes) == (32, 32, 2 * 16 * 4)
    full = model_states(shapes[:1], S.FULL_SHARD, world_size=4, rank=2, cpu_offload=CPUOffload.FULL)
    assert (full.grad_memory_bytes, full.device_bytes, full.host_bytes) == (12, 0, 24 + 12 + 24)
    frozen = model_states([((4, 2), torch.float32, False)], S.NO_SHARD, world_size=2)
    assert (frozen.param_memory_bytes, frozen.grad_memory_bytes, frozen.optim_memory_bytes) == (32, 0, 0)
    assert math.isnan(frozen.peak_memory_mb)
    assert frozen.current_allocation_mb == frozen.total_memory_mb() == 32 / 2**20


def test_invalid_arguments_raise() -> None:
    with pytest.raises(UsageError, match="HYBRID_SHARD needs shard_size"):
        model_states([], S.HYBRID_SHARD, world_size=4)
    with pytest.raises(UsageError, match=r"shard_size must divide world_size \(4\); got 3"):
        model_states([], S.HYBRID_SHARD, world_size=4, shard_size=3)
    with pytest.raises(UsageError, match="rank must be 0 to 1, as 2 ranks share one copy; got 2"):
        model_states([], S.HYBRID_SHARD, world_size=4, shard_size=2, rank=2)
    with pytest.raises(UsageError, match="Adafactor has states and parameters of different shapes"):
        OptimizerKind(torch.optim.Adafactor).bytes_per_element(torch.float32)
    with pytest.raises(UsageError, match="LBFGS needs more than gradients for a step"):
        OptimizerKind(torch.optim.LBFGS).bytes_per_element(torch.float32)


def test_probing_an_optimizer_counts_no_step() -> None:
    seen = []
    handle = register_optimizer_step_post_hook(lambda *args: seen.append(args))
    try:
        assert OptimizerKind(torch.optim.Adam, {"fused": True}).bytes_per_element(torch.bfloat16) == 4
    finally:
        handle.remove()
    assert not seen


class Live(TorchDispatchMode):
    """Return the bytes of storages that were created by operations and still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self._seen:
                storage = tensor.untyped_storage()
                self._seen.add(key)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        return out

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.bytes -= size


def _gradients(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def _forward_and_backward(blocks: int) -> Iterator[Any]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=32, hidden=32, blocks=4))
    model[1].register_module("drop", nn.Dropout(0.5))
    if blocks:
        assert checkpoint_blocks(model, Block, every=4 // blocks) == blocks
    tokens = torch.randint(256, (2, 32))
    with Live() as live:
        loss = next_byte_loss(model(tokens), tokens)
        yield live.bytes
    loss.backward()
    yield _gradients(model)


def test_checkpointed_blocks_use_less_memory_and_give_the_same_gradients() -> None:
    kept, gradients = zip(*(_forward_and_backward(blocks) for blocks in (0, 2, 4)), strict=True)
    assert kept[2] < 0.5 * kept[0]
    assert kept[1] == pytest.approx((kept[0] + kept[2]) / 2, rel=0.02)
    for others in gradients[1:]:
        assert all(torch.equal(own, other) for own, other in zip(gradients[0], others, strict=True))


def test_checkpointing_keeps_names_and_rejects_bad_arguments() -> None:
    model = GPT(GPTConfig(context=8, hidden=8, blocks=2))
    names = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    checkpoint_blocks(model, lambda module: isinstance(module, Block))
    assert names == (list(model.state_dict()), [name for name, _ in model.named_parameters()])
    with pytest.raises(UsageError, match="block0 already has its own forward"):
        checkpoint_blocks(model, Block)
    with pytest.raises(UsageError, match=r"No module of GPT matches .* it contains Attention, Block, Embedding"):
        checkpoint_blocks(model, nn.Conv2d)
    with pytest.raises(UsageError, match="every must be at least 1; got 0"):
        checkpoint_blocks(model, Block, every=0)


def test_torch_has_the_hooks_for_offloading_parameters(two: Any) -> None:
    """If this fails, torch has changed: `axon_nb/parallel/data/units.py` documents the internals that it uses."""

    def work(world: World) -> Any:
        parts = FSDP(_model(), world, cpu_offload=CPUOffload.PARAMS)._host._parts
        return [name for part in parts for name in missing_hooks("parallel.offload", part=part)]

    assert two.run(work) == [[], []]
    assert missing_hooks("parallel.offload", part=object()) == [
        f"part.{name}" for name in ("_sharded_param_data", "padded_sharded_param_size", "sharded_param", "sharded_size")
    ]


@pytest.mark.parametrize("offload", [CPUOffload.PARAMS, CPUOffload.OPTIMIZER_STATES])
def test_offloaded_states_move_for_a_step_and_stay_readable(two: Any, offload: CPUOffload) -> None:
    def work(world: World) -> Any:
        model = FSDP(_model(), world, cpu_offload=offload)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        own: Any = next(model.parameters())
        model(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()
        held = own if offload is CPUOffload.PARAMS else optimizer.state[own]["momentum_buffer"]
        home, seen = held.to_local(), []
        optimizer.register_step_post_hook(lambda *_: None)
        optimizer.register_step_pre_hook(lambda *_: seen.append(held.to_local()))
        model(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()
        values = torch.equal(model.full_state_dict()["0.weight"][: len(own.to_local())], own.to_local())
        saved: Any = model.module.state_dict()["0.weight"]  # on the device, as views of what is on the host raise there
        apart = offload is not CPUOffload.PARAMS or saved.to_local().data_ptr() != own.to_local().data_ptr()
        assert apart
        assert torch.equal(saved.to_local(), own.to_local())
        moved = seen[0].data_ptr() != home.data_ptr() and held.to_local().data_ptr() != seen[0].data_ptr()
        return moved, values or world.rank() > 0

    assert two.run(work) == [(True, True)] * 2


def test_parameters_without_data_cannot_be_offloaded(two: Any) -> None:
    def work(world: World) -> str:
        with torch.device("meta"):
            model = nn.Linear(4, 4)
        with pytest.raises(UsageError, match="the parameters have no data") as reported:
            FSDP(model, world, cpu_offload=CPUOffload.PARAMS)
        return str(reported.value)

    assert len(two.run(work)) == 2
