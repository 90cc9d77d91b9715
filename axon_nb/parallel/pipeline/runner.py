"""One pipeline of torch's, made for batches of one shape: stages, schedule, and what its first step must not leave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.spans import now
from axon_nb.parallel.pipeline.schedule import PipelineSchedule
from axon_nb.parallel.pipeline.torch_hooks import StageWatch, is_prepared, missing, quiet, schedule_class

__all__ = ["Runner"]


class Runner:
    """Runs training steps.

    Args:
        modules: This rank's stages.
        schedule: In which order.
        num_stages: Stages of all ranks.
        num_microbatches: Microbatches of a batch.
        group: The ranks of the pipeline.
        devices: Where each stage computes.
        loss: The loss of one microbatch, from output and target, to go backward from.
        spans: Whether to record every action.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        *,
        schedule: PipelineSchedule,
        num_stages: int,
        num_microbatches: int,
        group: ProcessGroup,
        devices: Mapping[int, torch.device],
        loss: Callable[[Any, Any], torch.Tensor],
        spans: bool,
    ) -> None:
        from torch.distributed.pipelining import PipelineStage as TorchStage

        torch_group = group.torch_group
        stages = [
            TorchStage(module, index, num_stages, devices[index], group=torch_group)
            for index, module in sorted(modules.items())
        ]
        self._modules = list(modules.values())
        self._has_run = False
        self.watches: dict[int, StageWatch] = {}
        """By stage; empty when nothing is recorded."""
        if spans and not missing():
            rank, name = group.ranks[group.rank()], torch_group.group_name
            self.watches = {stage.stage_index: StageWatch(stage, rank=rank, group=name) for stage in stages}
        # The loss is divided, rather than gradients afterwards: those of earlier steps may wait in the same place.
        self._schedule = schedule_class(schedule)(
            stages if schedule.has_many_stages else stages[0], num_microbatches, loss_fn=loss, scale_grads=False
        )

    def step(self, args: tuple[Any, ...], target: Any) -> None:
        """Forward and backward of one batch.

        Args:
            args: Of the first stage; empty where that is not.
            target: Of the last stage; None where that is not.
        """
        began = now()
        for watch in self.watches.values():
            watch.begin_step(began)
        prepared = is_prepared(self._schedule, self._has_run)
        with quiet(), contextlib.nullcontext() if prepared else _untouched(self._modules):
            try:
                self._schedule.step(*args, target=target, return_outputs=False)
            except RuntimeError as error:
                if (cause := _raised_in_a_stage(error)) is None:
                    raise
                raise cause from None
        self._has_run = True


def _raised_in_a_stage(error: RuntimeError) -> BaseException | None:
    """What a stage's own code raised: torch puts its message, with all arguments, in front of it."""
    text = str(error).lower()
    return error.__cause__ if "failed to run forward" in text or "failed to run stage" in text else None


@contextlib.contextmanager
def _untouched(modules: list[nn.Module]) -> Iterator[None]:
    """For a step in which torch first runs one microbatch to learn shapes: it leaves buffers and gradients as they are.

    BatchNorm would count that microbatch twice; DDP would take the first backward for the last one, and average too
    early; and torch drops all gradients of FSDP2 modules after it (2.13).
    """
    restores = [_after_a_forward(module) for module in modules]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    kept = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for restore in restores:
            restore()
        with torch.no_grad():
            for parameter, grad in kept:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


def _after_a_forward(module: nn.Module) -> Callable[[], None]:
    """Have buffers put back after the next forward, of which DDP is told that it averages nothing.

    Returns:
        What does so now, where it has not been done.
    """
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    ddp: Any = module if isinstance(module, DistributedDataParallel) and module.require_backward_grad_sync else None
    if ddp is not None:
        ddp.require_backward_grad_sync = False

    def restore(*_: Any) -> None:
        nonlocal kept
        handle.remove()
        for buffer, before in kept:
            buffer.data.copy_(before)  # by data: autograd has noted the buffers of this forward, which goes nowhere
        kept = []
        if ddp is not None:
            ddp.require_backward_grad_sync = True

    handle = module.register_forward_hook(restore)
    return restore
