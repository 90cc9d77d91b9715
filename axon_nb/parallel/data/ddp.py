"""Data parallelism: torch's DistributedDataParallel with this library's groups, strategies and checks."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from axon_nb.comm.collectives.movement import broadcast
from axon_nb.comm.collectives.reduction import all_reduce_max
from axon_nb.comm.gradients import sync_gradients
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.comm.synchronizer import GradSyncStrategy
from axon_nb.errors import UsageError
from axon_nb.parallel.data.gathering import on_backward_start
from axon_nb.parallel.data.model_check import check_model
from axon_nb.parallel.hooks import CommHook
from axon_nb.parallel.input_device import check_inputs
from axon_nb.parallel.strategies import parse_enum

_SINGLE_BUCKET_MIB = 1 << 20
_renamed = "forward_sync_buffers" in inspect.signature(TorchDDP.__init__).parameters
_BUFFERS = "forward_sync_buffers" if _renamed else "broadcast_buffers"
"""torch's name of the argument; torch 2.13 renamed it."""


class DDP(TorchDDP):
    """Every rank holds the whole model and trains on a part of the batch; backward averages gradients over ranks.

    Args:
        model: The same on all ranks; rank 0's parameters and buffers are sent to all.
        group: A World, one of our groups or torch's; None means all ranks.
        bucket_size_mb: Size of the gradient buckets, in MiB (as torch's `bucket_cap_mb`).
        broadcast_buffers: Send rank 0's buffers (such as BatchNorm's running statistics) to all before each forward.
        gradient_as_bucket_view: Make gradients views into the buckets: saves memory and one copy.
        strategy: OVERLAPPED averages each bucket while backward continues. SYNCHRONOUS uses one bucket, averaged at
            the end. NO_SYNC averages only in `sync_gradients`.
        static_graph: The same parameters are used in every step.
        find_unused_parameters: Some parameters may get no gradient in a step.
        torch_options: Other arguments of torch's DDP, such as `device_ids`. `process_group` and `bucket_cap_mb` are
            accepted as other names of `group` and `bucket_size_mb`.

    Raises:
        UsageError: no parameter requires a gradient, or an option is invalid.
        TensorError: parameters are on different devices, or have no data yet.
        TensorMismatchError: the model differs between ranks; the message names the parameter and the rank.
        NotInGroupError: this rank is not a member of the group.
    """

    def __init__(
        self,
        model: nn.Module,
        group: GroupLike | Any = None,
        *,
        bucket_size_mb: float = 25.0,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        strategy: GradSyncStrategy = GradSyncStrategy.OVERLAPPED,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        **torch_options: Any,
    ) -> None:
        buffers: dict[str, Any] = {_BUFFERS: broadcast_buffers}
        resolved = resolve(group if group is not None else torch_options.pop("process_group", None))
        bucket_size_mb = torch_options.pop("bucket_cap_mb", None) or bucket_size_mb
        if not isinstance(bucket_size_mb, (int, float)) or not bucket_size_mb > 0:
            raise UsageError(f"bucket_size_mb must be a positive number of MiB; got {bucket_size_mb!r}.")
        strategy = parse_enum(GradSyncStrategy, strategy, "strategy")
        check_model(model, resolved)
        super().__init__(
            model,
            process_group=resolved.torch_group,
            bucket_cap_mb=_SINGLE_BUCKET_MIB if strategy is GradSyncStrategy.SYNCHRONOUS else bucket_size_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            **buffers,
            **torch_options,
        )
        self._strategy = strategy
        self._averaged = True
        devices = {parameter.device for parameter in model.parameters()}
        # With `device_ids` torch moves the inputs; a model on several devices expects them where it likes.
        self._input_device = devices.pop() if len(devices) == 1 and self.device_ids is None else None
        self.require_backward_grad_sync = strategy is not GradSyncStrategy.NO_SYNC

    @property
    def group(self) -> ProcessGroup:
        """The group that averages gradients."""
        return resolve(self.process_group)

    @property
    def strategy(self) -> GradSyncStrategy:
        """When gradients are averaged."""
        return self._strategy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        if (device := self._input_device) is not None:
            check_inputs(device.type, lambda: device, args, kwargs)
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        averages = bool(self.require_backward_grad_sync)
        if not averages:
            self._averaged = False
        output = super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        if averages and not self._averaged:
            # Deferred: a forward without backward, such as for a validation loss, averages nothing.
            on_backward_start(output, self._mark_averaged)
        return output

    def _mark_averaged(self) -> None:
        self._averaged = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients inside; the next backward outside, or `sync_gradients`, averages the sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Allow ranks to have different numbers of batches; see torch's `join`.

        Raises:
            UsageError: the strategy is NO_SYNC, where a rank without batches cannot know when the others average.
        """
        if self._strategy is GradSyncStrategy.NO_SYNC:
            raise UsageError("join() needs automatic averaging; use a strategy other than NO_SYNC.")
        return super().join(*args, **kwargs)

    def sync_gradients(self) -> None:
        """Average the gradients over ranks, unless the last backward already has. Collective.

        A parameter with a gradient on only some ranks counts as zero on the others.
        """
        if self._averaged:
            return
        group = self.group
        ignored = self.parameters_to_ignore
        parameters = [p for name, p in self.module.named_parameters() if p.requires_grad and name not in ignored]
        has_gradient = torch.tensor([parameter.grad is not None for parameter in parameters], device=self.device)
        all_reduce_max(has_gradient, group=group)
        for parameter, anywhere in zip(parameters, has_gradient.tolist(), strict=True):
            if anywhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sync_gradients(parameters, group=group)
        self._averaged = True
        self.require_forward_param_sync = True  # the next forward broadcasts buffers, as after an automatic average

    @torch.no_grad()
    def sync_parameters(self, src: int = 0) -> None:
        """Send the parameters and buffers of rank `src` of the group to all ranks. Collective.

        Raises:
            InvalidRankError: the group has no rank `src`.
        """
        group = self.group
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if name not in self.parameters_to_ignore:
                broadcast(tensor, src=src, group=group)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the group, as torch does. A copy uses the default group, and so does its hook."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state["_comm_hooks"] = [(call, _without_group(hook)) for call, hook in self._comm_hooks]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the hook on the copy: torch's own `__setstate__` lists hooks without activating them."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        hooks, self._comm_hooks = self._comm_hooks, []
        for call, hook in hooks:
            if isinstance(hook, CommHook):
                hook.group = self.process_group
            self.register_comm_hook(hook, call)

    def register_hook(self, hook: CommHook) -> CommHook:
        """Let `hook` average the gradients. Call it once, before the first step. Returns the hook.

        Raises:
            UsageError: the hook needs all gradients in one bucket, one is already registered, it belongs to another
                model, or the strategy is NO_SYNC.
        """
        if not isinstance(hook, CommHook):
            raise UsageError(
                f"hook must be one of axon_nb.parallel's, such as FP16(); got {hook!r}. For torch's own hooks, use "
                "`register_comm_hook(state, hook)`."
            )
        if self._strategy is GradSyncStrategy.NO_SYNC:
            raise UsageError("Hooks need automatic averaging; use a strategy other than NO_SYNC.")
        if self._comm_hooks:
            raise UsageError("This model already has a hook; wrap the model again to use another one.")
        if hook.group is not None:
            raise UsageError(f"This {type(hook).__name__} belongs to another model; create a new one.")
        if hook.needs_single_bucket and self._strategy is not GradSyncStrategy.SYNCHRONOUS:
            raise UsageError(
                f"{type(hook).__name__} needs all gradients in one bucket; use "
                "DDP(…, strategy=GradSyncStrategy.SYNCHRONOUS)."
            )
        hook.group = self.process_group
        self.register_comm_hook(hook, _call)
        return hook


DistributedDataParallel = DDP


def _without_group(hook: Any) -> Any:
    if not isinstance(hook, CommHook):
        return hook
    bare = copy.copy(hook)
    bare.group = None
    return bare


def _call(hook, bucket):  # type: ignore[no-untyped-def]
    # torch requires the second argument to be called `bucket`, and rejects annotations that are strings.
    return hook.call(bucket)
