"""Runs training steps with torch's schedule, for batches of one shape."""

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
from axon_nb.parallel.pipeline.torch_hooks import StageWatch, is_prepared, quiet, schedule_class
from axon_nb.records.hooks import missing_hooks
from axon_nb.torch_api import torch_api


class Runner:
    """Wraps torch's stages and schedule, and cleans up after torch's shape inference.

    Args:
        modules: This rank's stages, by index.
        schedule: Order of computation.
        num_stages: Number of stages on all ranks.
        num_microbatches: Microbatches per batch.
        group: The ranks of the pipeline.
        devices: Device of each stage.
        loss: Computes the loss of one microbatch from output and target.
        spans: Whether to record spans.
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
        for stage in stages:
            torch_api().prepare_stage(stage)
        self._modules = list(modules.values())
        self._has_run = False
        self.unshaped: list[nn.Module] = []
        """Stages whose next forward only infers shapes."""
        self.watches: dict[int, StageWatch] = {}
        """By stage; empty if nothing is recorded."""
        if spans and not missing_hooks("parallel.pipeline_spans"):
            rank, name = group.ranks[group.rank()], torch_group.group_name
            self.watches = {stage.stage_index: StageWatch(stage, rank=rank, group=name) for stage in stages}
        # The loss is divided instead of the gradients, which may include those of earlier steps.
        self._schedule = schedule_class(schedule)(
            stages if schedule.has_many_stages else stages[0], num_microbatches, loss_fn=loss, scale_grads=False
        )

    def step(self, args: tuple[Any, ...], target: Any) -> None:
        """Run forward and backward of one batch.

        Args:
            args: Arguments of the first stage; empty on ranks without it.
            target: Target of the last stage; None on ranks without it.
        """
        # torch 2.11 gives a stage strides that a slice of a larger tensor does not have, and then refuses them.
        args = tuple(arg.contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args)
        start = now()
        for watch in self.watches.values():
            watch.begin_step(start)
        prepared = is_prepared(self._schedule, self._has_run)
        with quiet(), contextlib.nullcontext() if prepared else _preserve_state(self._modules, self.unshaped):
            try:
                self._schedule.step(*args, target=target, return_outputs=False)
            except RuntimeError as error:
                if (cause := _stage_exception(error)) is None:
                    raise
                raise cause from None
        self._has_run = True


def _stage_exception(error: RuntimeError) -> BaseException | None:
    """Return the exception raised by a stage's own code: torch prefixes its message with all arguments."""
    text = str(error).lower()
    return error.__cause__ if "failed to run forward" in text or "failed to run stage" in text else None


@contextlib.contextmanager
def _preserve_state(modules: list[nn.Module], unshaped: list[nn.Module]) -> Iterator[None]:
    """Restore buffers and gradients after a step in which torch first runs one microbatch to infer shapes.

    Otherwise BatchNorm would count that microbatch twice, DDP would take the first backward for the last one and
    average too early, and torch would drop all gradients of FSDP2 modules (2.13).
    """
    unshaped[:] = modules
    restores = [_restore_after_forward(module, unshaped) for module in modules]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    saved = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in saved:
        parameter.grad = None
    try:
        yield
    finally:
        for restore in restores:
            restore()
        with torch.no_grad():
            for parameter, grad in saved:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


def _restore_after_forward(module: nn.Module, unshaped: list[nn.Module]) -> Callable[[], None]:
    """Restore buffers after the next forward, and disable DDP's averaging during it.

    Returns:
        A function that does so now, unless already done.
    """
    saved = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    ddp: Any = module if isinstance(module, DistributedDataParallel) and module.require_backward_grad_sync else None
    if ddp is not None:
        ddp.require_backward_grad_sync = False

    def restore(*_: Any) -> None:
        nonlocal saved
        handle.remove()
        unshaped[:] = [other for other in unshaped if other is not module]
        for buffer, before in saved:
            buffer.data.copy_(before)  # through data: autograd has recorded the buffers of this discarded forward
        saved = []
        if ddp is not None:
            ddp.require_backward_grad_sync = True

    handle = module.register_forward_hook(restore)
    return restore
