"""Data parallelism: torch's DistributedDataParallel, with the group, the strategy and the checks of this library."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from axon_nb.comm.errors import CommError
from axon_nb.comm.gradients import sync_gradients
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.comm.move import broadcast
from axon_nb.comm.reduce import all_reduce_max
from axon_nb.comm.synchronizer import GradSyncStrategy
from axon_nb.parallel.backward import before_backward
from axon_nb.parallel.hooks import CommHook
from axon_nb.parallel.same_model import check_model
from axon_nb.parallel.strategies import known

__all__ = ["DDP", "DistributedDataParallel"]

_ONE_BUCKET_MB = 1 << 20
_renamed = "forward_sync_buffers" in inspect.signature(TorchDDP.__init__).parameters
_BUFFERS = "forward_sync_buffers" if _renamed else "broadcast_buffers"
"""torch's name of the argument, which 2.13 has changed."""


class DDP(TorchDDP):
    """Every rank has the whole model and a part of the batch; gradients are averaged over ranks in backward.

    Args:
        model: The same on all ranks; parameters and buffers of rank 0 are sent to all.
        group: A World, a group of ours or of torch's; None: all ranks.
        bucket_size_mb: MiB of gradients that travel together.
        broadcast_buffers: Send rank 0's buffers (running statistics of BatchNorm) to all before each forward.
        gradient_as_bucket_view: Gradients are views into the buckets: less memory and one copy less.
        strategy: OVERLAPPED averages each bucket while backward goes on; SYNCHRONOUS has one bucket, at its end;
            NO_SYNC averages only in `sync_gradients`.
        static_graph: The same parameters take part in every step.
        find_unused_parameters: Some parameters may get no gradient in a step.
        torch_options: More of torch's own arguments, such as `device_ids`; `process_group` and `bucket_cap_mb` are
            other names of `group` and `bucket_size_mb`.

    Raises:
        CommError: no parameter needs a gradient; an option has no meaning.
        TensorError: parameters are on different devices, or have no data yet.
        TensorMismatch: the model differs between ranks; names the parameter and the rank.
        NotInGroup: this rank is no member of the group.
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
        own = resolve(group if group is not None else torch_options.pop("process_group", None))
        bucket_size_mb = torch_options.pop("bucket_cap_mb", None) or bucket_size_mb
        if not isinstance(bucket_size_mb, (int, float)) or not bucket_size_mb > 0:
            raise CommError(f"bucket_size_mb={bucket_size_mb!r}: it is a number of MiB above 0.")
        strategy = known(GradSyncStrategy, strategy, "strategy")
        check_model(model, own)
        super().__init__(
            model,
            process_group=own.torch_group,
            bucket_cap_mb=_ONE_BUCKET_MB if strategy is GradSyncStrategy.SYNCHRONOUS else bucket_size_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            **buffers,
            **torch_options,
        )
        self._strategy = strategy
        self._averaged = True
        self.require_backward_grad_sync = strategy is not GradSyncStrategy.NO_SYNC

    @property
    def group(self) -> ProcessGroup:
        """The ranks that average."""
        return resolve(self.process_group)

    @property
    def strategy(self) -> GradSyncStrategy:
        """When gradients are averaged."""
        return self._strategy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        averages = bool(self.require_backward_grad_sync)
        if not averages:
            self._averaged = False
        output = super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        if averages and not self._averaged:
            # Not yet: a forward that no backward follows, to look at a loss, averages nothing.
            before_backward(output, self._has_averaged)
        return output

    def _has_averaged(self) -> None:
        self._averaged = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward only accumulates; the next backward outside, or `sync_gradients`, averages the sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Within it ranks may have different numbers of batches; see torch's `join`.

        Raises:
            CommError: NO_SYNC: a rank without batches could not know when the others average.
        """
        if self._strategy is GradSyncStrategy.NO_SYNC:
            raise CommError("join() follows automatic averaging: use another strategy than NO_SYNC.")
        return super().join(*args, **kwargs)

    def sync_gradients(self) -> None:
        """Average the gradients over ranks, unless the last backward has done so; collective.

        A parameter that has a gradient on some ranks only counts as zero on the others.
        """
        if self._averaged:
            return
        group = self.group
        left_alone = self.parameters_to_ignore
        parameters = [p for name, p in self.module.named_parameters() if p.requires_grad and name not in left_alone]
        there = torch.tensor([parameter.grad is not None for parameter in parameters], device=self.device)
        all_reduce_max(there, group=group)
        for parameter, somewhere in zip(parameters, there.tolist(), strict=True):
            if somewhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sync_gradients(parameters, group=group)
        self._averaged = True
        self.require_forward_param_sync = True  # the next forward sends buffers, as after an automatic average

    @torch.no_grad()
    def sync_parameters(self, src: int = 0) -> None:
        """Send the parameters and buffers of rank `src` of the group to all; collective.

        Raises:
            InvalidRank: the group has no rank `src`.
        """
        group = self.group
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if name not in self.parameters_to_ignore:
                broadcast(tensor, src=src, group=group)

    def __getstate__(self) -> dict[str, Any]:
        """Without the group, as torch's; a copy is in the default group, and its hook averages there."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state["_comm_hooks"] = [(call, _without_group(hook)) for call, hook in self._comm_hooks]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has a hook of its own; torch's would be told about, but not used."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        hooks, self._comm_hooks = self._comm_hooks, []
        for call, hook in hooks:
            if isinstance(hook, CommHook):
                hook.group = self.process_group
            self.register_comm_hook(hook, call)

    def register_hook(self, hook: CommHook) -> CommHook:
        """Have `hook` average the gradients; once, before the first step. Returns it.

        Raises:
            CommError: it needs all gradients in one bucket; there is one already, or it serves another model; gradients
                are averaged by `sync_gradients`, which has no hooks.
        """
        if not isinstance(hook, CommHook):
            raise CommError(
                f"hook={hook!r}: it is one of axon_nb.parallel's, such as FP16(); torch's own are taken by "
                "`register_comm_hook(state, hook)`."
            )
        if self._strategy is GradSyncStrategy.NO_SYNC:
            raise CommError("hooks take part in automatic averaging: use another strategy than NO_SYNC.")
        if self._comm_hooks:
            raise CommError("this model has a hook already: wrap the model anew to try another.")
        if hook.group is not None:
            raise CommError(f"this {type(hook).__name__} serves another model, and keeps what belongs to it: make one.")
        if hook.one_bucket and self._strategy is not GradSyncStrategy.SYNCHRONOUS:
            raise CommError(
                f"{type(hook).__name__} needs all gradients in one bucket: "
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
    # torch insists on a function whose second argument is called `bucket`, and reads annotations, which are text here.
    return hook.call(bucket)
