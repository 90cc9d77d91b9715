"""Data parallelism: torch's DistributedDataParallel with this library's groups, strategies and checks.

Before anything else is sent, all ranks of a group check that they hold the same trainable model.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parameter import is_lazy

from axon_nb.comm.collectives.movement import broadcast
from axon_nb.comm.collectives.reduction import all_reduce_max
from axon_nb.comm.errors import TensorError, TensorMismatchError
from axon_nb.comm.gradients import GradSyncStrategy, sync_gradients
from axon_nb.comm.group import Backend, GroupLike, ProcessGroup, resolve
from axon_nb.comm.placements import placed
from axon_nb.compat.hints import before
from axon_nb.errors import UsageError
from axon_nb.parallel.data.units import on_backward_start
from axon_nb.parallel.hooks import CommHook
from axon_nb.parallel.loop import check_inputs
from axon_nb.parallel.memory import parse_enum

_SINGLE_BUCKET_MIB = 1 << 20
_renamed = "forward_sync_buffers" in inspect.signature(TorchDDP.__init__).parameters
_BUFFERS = "forward_sync_buffers" if _renamed else "broadcast_buffers"
"""torch's name of the argument; torch 2.13 renamed it."""
Description = list[tuple[str, str, tuple[int, ...], str]]


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
        if isinstance(model, nn.Module):
            leave_out_shards(model, resolved)
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


def check_model(model: nn.Module, group: ProcessGroup) -> None:
    """Check the model on this rank and compare it with those of the other ranks. Collective.

    A problem on one rank is raised on all of them, so that none waits for it. (torch's own check compares shapes only
    and names neither the parameter nor the rank.)

    Raises:
        UsageError: no parameter requires a gradient.
        TensorError: parameters are on different devices, have no data yet, or are on a device the group cannot access.
        TensorMismatchError: the model differs between ranks; the message names the parameter and the rank.
    """
    problem = _problem(model, group)
    description = _description(model) if problem is None else problem
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, description, group=group.torch_group)
    if problem is not None:
        raise problem
    for rank, other in zip(group.ranks, everyone, strict=True):
        if isinstance(other, UsageError):
            raise type(other)(f"On rank {rank}: {other}")
    for rank, other in zip(group.ranks, everyone, strict=True):
        _compare(everyone[0], other, group.ranks[0], rank)


@functools.cache
def prepare_torch_ddp() -> None:
    """Have torch's own DDP leave out shards, too: it would send rank 0's to all ranks, and average their gradients."""
    signature = inspect.signature(TorchDDP.__init__)

    def look(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        mesh = given.get("device_mesh")
        leave_out_shards(given["module"], resolve(given.get("process_group") if mesh is None else mesh.get_group()))

    before(TorchDDP, "__init__", look)


def leave_out_shards(model: nn.Module, group: ProcessGroup) -> None:
    """Let torch's DDP ignore parameters of which ranks of the group hold declared parts, such as experts."""
    parts = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) or (found := placed(parameter)) is None:
            continue
        axes = [axis for axis, kind in enumerate(found.placements) if not kind.is_replicate()]
        if any(len({*resolve(found.mesh.get_group(axis)).ranks} & {*group.ranks}) > 1 for axis in axes):
            parts.append(name)
    if parts:
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        model._ddp_params_and_buffers_to_ignore = [*ignored, *parts]  # type: ignore[assignment]


def _parameters_and_buffers(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Return parameters and buffers, except those that torch's DDP was asked to ignore."""
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    parameters = {name: item for name, item in model.named_parameters() if name not in ignored}
    return parameters, {name: item for name, item in model.named_buffers() if name not in ignored}


def _problem(model: Any, group: ProcessGroup) -> UsageError | None:
    if not isinstance(model, nn.Module):
        hint = " Create an instance first." if isinstance(model, type) else ""
        return UsageError(f"model must be an nn.Module; got {model!r}.{hint}")
    parameters, buffers = _parameters_and_buffers(model)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        return UsageError(
            f"{type(model).__name__} has no parameter that requires a gradient, so sent is nothing to average; "
            "use the model without a wrapper."
        )
    shapeless: list[str] = [name for name, item in (*parameters.items(), *buffers.items()) if is_lazy(item)]
    if shapeless:
        return TensorError(
            f"{shapeless[0]} is lazy and has no shape yet; run the model on a sample before wrapping it."
        )
    kinds = {parameter.device.type for parameter in parameters.values()}
    if len(kinds) > 1:
        return TensorError(f"The model's parameters are on {' and '.join(sorted(kinds))}; call model.to(device) first.")
    if kinds == {"meta"}:
        return TensorError(
            "The model's parameters are on the meta device and have no data; call model.to_empty(device=…) first."
        )
    if kinds != {"cuda"} and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return TensorError(
            f"torch's SyncBatchNorm works on GPUs only, and the model is on {kinds.pop()}; use "
            "axon_nb.parallel.SyncBatchNorm.convert(model), which works anywhere."
        )
    if group.backend is Backend.NCCL and kinds != {"cuda"}:
        return TensorError(f"NCCL needs CUDA tensors, and the model is on {kinds.pop()}; call model.to(device) first.")
    return None


def _description(model: nn.Module) -> Description:
    parameters, buffers = _parameters_and_buffers(model)
    described = [
        (name, str(item.dtype), tuple(item.shape), "" if item.requires_grad else " without gradient")
        for name, item in parameters.items()
    ]
    return described + [(name, str(item.dtype), tuple(item.shape), ", a buffer") for name, item in buffers.items()]


def _compare(first: Description, other: Description, first_rank: int, rank: int) -> None:
    if other == first:
        return
    pair = next(((a, b) for a, b in zip(first, other, strict=False) if a != b), None)
    own_text, other_text = (
        (f"{len(first)} parameters and buffers", str(len(other))) if pair is None else map(_describe_tensor, pair)
    )
    raise TensorMismatchError(
        f"The model differs between ranks: rank {first_rank} has {own_text}, rank {rank} has {other_text}. "
        "Build the same model on every rank."
    )


def _describe_tensor(item: tuple[str, str, tuple[int, ...], str]) -> str:
    name, dtype, shape, note = item
    return f"{name} of {dtype} {shape}{note}"


@torch.no_grad()
def broadcast_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Copy the parameters and buffers of the mesh's first rank to all its ranks. Collective.

    Tensors without data are skipped. Of a DTensor, sharded over another axis, each rank's shard is sent.

    Raises:
        TensorMismatchError: a tensor has another shape or dtype on another rank.
    """
    groups = [ProcessGroup.wrap(mesh.get_group(dim)) for dim in reversed(range(mesh.ndim)) if mesh.size(dim) > 1]
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        if local.is_meta or not local.numel():
            continue
        # One at a time: the whole model may not fit on the device.
        sent = local.to(mesh.device_type) if groups and groups[0].backend is Backend.NCCL else local
        sent = sent.contiguous()
        for group in groups:
            broadcast(sent, group=group)
        if sent is not local:
            local.copy_(sent)
