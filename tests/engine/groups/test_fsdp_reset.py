"""FSDP after an aborted step: the step that is run again gives the weights of an undisturbed one, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from axon_nb.comm import World
from axon_nb.engine.groups import recovery
from tests.support.training.models import Block, batch, blocks, loss_of

N = 2
WHERE = [
    "before",
    "in the forward",
    "after the forward",
    "in the backward",
    "after the backward",
    "in a state dict",
]
FSDP1: dict[str, dict[str, Any]] = {
    "FSDP1": {"use_orig_params": True, "forward_prefetch": True},
    "FSDP1 with flat parameters of low precision": {
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    },
    "FSDP1 with gradients sharded": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True},
    "FSDP1 without shards": {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": True},
}

pytestmark = pytest.mark.filterwarnings("ignore:.*NO_SHARD", "ignore:.*deprecated:FutureWarning")


class Broken(Exception):
    """The step ends here."""


def _build(kind: str = "FSDP2") -> Any:
    model = blocks()
    if kind != "FSDP2":
        policy = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **FSDP1[kind])
    mesh = init_device_mesh("cpu", (N,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _reset(model: Any) -> None:
    fsdp, fsdp1 = (
        [m for m in model.modules() if isinstance(m, kind)] for kind in (FSDPModule, FullyShardedDataParallel)
    )
    recovery.reset_modules(fsdp=fsdp, fsdp1=fsdp1)


def _weights(model: Any) -> list[torch.Tensor]:
    if isinstance(model, FSDPModule):
        return [p.full_tensor().detach() for p in model.parameters()]
    with FullyShardedDataParallel.summon_full_params(model):
        return [p.detach().clone() for p in model.parameters()]


def _backward(model: Any, rank: int, fail: str = "never") -> None:
    x, y = (part.chunk(N)[rank] for part in batch())
    inner = [module for module in model.modules() if isinstance(module, Block)]

    def stop(*args: Any) -> None:
        raise Broken

    handle = None
    if fail == "before":
        stop()
    if fail == "in the forward":
        handle = inner[2].up.register_forward_hook(stop)
    if fail == "in the backward":
        handle = inner[1].up.register_full_backward_hook(stop)
    if fail == "in a state dict":
        handle = inner[1].up.register_state_dict_post_hook(stop)
    try:
        if fail == "in a state dict":
            model.state_dict()
        loss = loss_of(model(x), y)
        if fail == "after the forward":
            stop()
        loss.backward()
        if fail == "after the backward":
            stop()
    finally:
        if handle is not None:
            handle.remove()


def _train(world: World, kind: str, fail: str, *, accumulates: bool) -> list[torch.Tensor]:
    model = _build(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(4):
        if accumulates:
            _backward(model, world.rank())
        if step == 1 and fail != "never":
            with pytest.raises(Broken):
                _backward(model, world.rank(), fail)
            _reset(model)
            if not accumulates:
                optimizer.zero_grad()
        _backward(model, world.rank())
        optimizer.step()
        optimizer.zero_grad()
    return _weights(model)


@pytest.fixture(scope="module")
def undisturbed() -> Callable[[str, bool], list[torch.Tensor]]:
    """Returns the weights of a kind of model after training without a failure."""

    @functools.cache
    def train(kind: str, accumulates: bool) -> list[torch.Tensor]:
        return World.mock(N).run(_train, kind, "never", accumulates=accumulates)[0]

    return train


@pytest.mark.parametrize("kind", ["FSDP2", *FSDP1])
@pytest.mark.parametrize("fail", WHERE)
def test_rerun_step_is_bitwise_identical(undisturbed: Any, kind: str, fail: str) -> None:
    _compare(World.mock(N).run(_train, kind, fail, accumulates=False), undisturbed(kind, False))


@pytest.mark.parametrize("kind", ["FSDP2", *FSDP1])
@pytest.mark.parametrize("fail", ["in the forward", "in a state dict"])
def test_gradients_of_earlier_backwards_stay(undisturbed: Any, kind: str, fail: str) -> None:
    _compare(World.mock(N).run(_train, kind, fail, accumulates=True), undisturbed(kind, True))


def _compare(ranks: list[list[torch.Tensor]], reference: list[torch.Tensor]) -> None:
    for weights in ranks:
        assert all(torch.equal(*pair) for pair in zip(weights, reference, strict=True))
