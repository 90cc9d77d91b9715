"""The checks that wrappers, such as DDP, continue after an aborted step with the same weights, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from axon_nb.engine.groups import recovery
from axon_nb.engine.groups.abort import AbortedError
from axon_nb.engine.self_test.checks import aborted_when_waiting, join, recover_groups
from axon_nb.engine.self_test.process import CheckProcess

_CPU = torch.device("cpu")
_Step = Callable[[int], None]


def _train_through_abort(process: CheckProcess, make: Callable[[], _Step], weights: Callable[[], Any]) -> None:
    """Check that steps 0, 1, 2, with step 1 aborted on rank 0 and repeated, equal undisturbed ones bit for bit.

    Args:
        process: This process.
        make: Creates a fresh model and returns its step, which takes the step's number.
        weights: Returns the parameters of the model created last.
    """
    step = make()
    for number in range(3):
        step(number)
    expected = weights()
    step = make()
    step(0)
    if process.rank == 0:
        with aborted_when_waiting():
            step(1)
    else:
        with contextlib.suppress(AbortedError, RuntimeError):
            recovery.abort(again=False)
    recover_groups()
    step(1)
    step(2)
    for actual, undisturbed in zip(weights(), expected, strict=True):
        if not torch.equal(actual, undisturbed):
            raise AssertionError("the repeated step gave different weights")


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _data(number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def _check_wrapper_reset(process: CheckProcess, wrap: Callable[[nn.Sequential], nn.Module]) -> None:
    join(process)
    models: list[nn.Module] = []

    def make() -> _Step:
        model = wrap(_layers())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        models[:] = [model]

        def step(number: int) -> None:
            optimizer.zero_grad()
            model(_data(number)).square().mean().backward()
            optimizer.step()

        return step

    def weights() -> list[torch.Tensor]:
        local: list[Any] = [getattr(p, "to_local", lambda p=p: p)() for p in models[0].parameters()]
        return [tensor.detach().clone() for tensor in local]

    _train_through_abort(process, make, weights)


def ddp_reset(process: CheckProcess) -> None:
    """Continue training a DDP model after a step in which one rank waited for the other."""
    _check_wrapper_reset(process, nn.parallel.DistributedDataParallel)


def fsdp2_reset(process: CheckProcess) -> None:
    """Continue training an FSDP2 model after such a step."""
    from torch.distributed.fsdp import fully_shard

    def wrap(model: nn.Sequential) -> nn.Module:
        for module in (model[0], model[2], model):
            fully_shard(module)
        return model

    _check_wrapper_reset(process, wrap)


def pipeline_reset(process: CheckProcess) -> None:
    """Continue training a pipeline of two stages after such a step."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    join(process)
    modules: list[nn.Module] = []

    def make() -> _Step:
        torch.manual_seed(process.rank)
        module = nn.Linear(8, 8)
        modules[:] = [module]
        stage = PipelineStage(module, process.rank, 2, _CPU)
        schedule: Any = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step(number: int) -> None:
            generator = torch.Generator().manual_seed(number)
            inputs, target = (torch.randn(8, 8, generator=generator) for _ in range(2))
            optimizer.zero_grad()
            if process.rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=target)
            optimizer.step()

        return step

    _train_through_abort(process, make, lambda: [p.detach().clone() for p in modules[0].parameters()])
