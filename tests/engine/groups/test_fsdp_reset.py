"""FSDP2 after an aborted step: the step that is run again gives the weights of an undisturbed one, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from axon_nb.comm import World
from axon_nb.engine.groups import wrapper_reset
from tests.support.training.models import batch, blocks, loss_of

N = 2
WHERE = ["before", "in the forward", "after the forward", "in the backward", "never"]


class Broken(Exception):
    """The step ends here."""


def _build() -> Any:
    model = blocks()
    mesh = init_device_mesh("cpu", (N,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _step(model: Any, optimizer: torch.optim.Optimizer, rank: int, fail: str = "never") -> None:
    x, y = (part.chunk(N)[rank] for part in batch())

    def stop(*args: Any) -> None:
        raise Broken

    handle = None
    if fail == "before":
        stop()
    if fail == "in the forward":
        handle = model[2].up.register_forward_hook(stop)
    if fail == "in the backward":
        handle = model[1].up.register_full_backward_hook(stop)
    try:
        loss = loss_of(model(x), y)
        if fail == "after the forward":
            stop()
        loss.backward()
    finally:
        if handle is not None:
            handle.remove()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("fail", WHERE)
def test_rerun_step_is_bitwise_identical(fail: str) -> None:
    def work(world: World, fail: str) -> list[torch.Tensor]:
        model = _build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        _step(model, optimizer, world.rank())
        if fail != "never":
            with pytest.raises(Broken):
                _step(model, optimizer, world.rank(), fail)
            wrapper_reset.reset_modules([], [m for m in model.modules() if isinstance(m, FSDPModule)], [])
            optimizer.zero_grad()
        for _ in range(2):
            _step(model, optimizer, world.rank())
        return [p.full_tensor().detach() for p in model.parameters()]

    undisturbed = World.mock(N).run(work, "never")[0]
    for weights in World.mock(N).run(work, fail):
        for weight, reference in zip(weights, undisturbed, strict=True):
            assert torch.equal(weight, reference)
