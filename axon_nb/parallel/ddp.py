"""Data parallelism: torch's DistributedDataParallel, with the group, the strategy and the checks of this library."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from axon_nb.comm.errors import CommError, TensorError, TensorMismatch
from axon_nb.comm.gradients import sync_gradients
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.comm.move import broadcast
from axon_nb.comm.synchronizer import GradSyncStrategy
from axon_nb.parallel.hooks import CommHook

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

    Raises:
        CommError: no parameter needs a gradient, or they are on different devices.
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
    ) -> None:
        buffers: dict[str, Any] = {_BUFFERS: broadcast_buffers}
        own = resolve(group)
        torch_group = own.torch_group
        _check_model(model)
        if not bucket_size_mb > 0:
            raise CommError(f"bucket_size_mb={bucket_size_mb}: it is a number of MiB above 0.")
        _check_same(model, own)
        super().__init__(
            model,
            process_group=torch_group,
            bucket_cap_mb=_ONE_BUCKET_MB if strategy is GradSyncStrategy.SYNCHRONOUS else bucket_size_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            **buffers,
        )
        self._group = own
        self._strategy = strategy
        self._averaged = True
        self.require_backward_grad_sync = strategy is not GradSyncStrategy.NO_SYNC

    @property
    def group(self) -> ProcessGroup:
        """The ranks that average."""
        return self._group

    @property
    def strategy(self) -> GradSyncStrategy:
        """When gradients are averaged."""
        return self._strategy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's."""
        if torch.is_grad_enabled():
            self._averaged = bool(self.require_backward_grad_sync)
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward only accumulates; the next backward outside, or `sync_gradients`, averages the sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def sync_gradients(self) -> None:
        """Average the gradients over ranks, unless the last backward has done so; collective."""
        if not self._averaged:
            sync_gradients(self.module.parameters(), group=self._group)
            self._averaged = True

    @torch.no_grad()
    def sync_parameters(self, src: int = 0) -> None:
        """Send the parameters and buffers of rank `src` of the group to all; collective.

        Raises:
            InvalidRank: the group has no rank `src`.
        """
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            broadcast(tensor, src=src, group=self._group)

    def register_hook(self, hook: CommHook) -> CommHook:
        """Have `hook` average the gradients; once, before the first step. Returns it.

        Raises:
            CommError: it needs all gradients in one bucket.
        """
        if hook.one_bucket and self._strategy is not GradSyncStrategy.SYNCHRONOUS:
            raise CommError(
                f"{type(hook).__name__} needs all gradients in one bucket: "
                "DDP(…, strategy=GradSyncStrategy.SYNCHRONOUS)."
            )
        hook.group = self._group.torch_group
        self.register_comm_hook(hook, _call)
        return hook


DistributedDataParallel = DDP


def _call(hook, bucket):  # type: ignore[no-untyped-def]
    # torch insists on a function whose second argument is called `bucket`, and reads annotations, which are text here.
    return hook.call(bucket)


def _check_model(model: nn.Module) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise CommError(
            f"{type(model).__name__} has no parameter that needs a gradient, so there is nothing to average: "
            "use the model as it is."
        )
    kinds = {parameter.device.type for parameter in model.parameters()}
    if len(kinds) > 1:
        raise TensorError(f"the model's parameters are on {' and '.join(sorted(kinds))}: model.to(device) first.")


def _check_same(model: nn.Module, group: ProcessGroup) -> None:
    """Torch's own check says which shapes differ, but neither the parameter nor the rank."""
    own = [(name, str(p.dtype), tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, own, group=group.torch_group)
    for rank, theirs in zip(group.ranks, everyone, strict=True):
        if theirs == everyone[0]:
            continue
        first, other = next(
            ((a, b) for a, b in zip(everyone[0], theirs, strict=False) if a != b),
            (f"{len(everyone[0])} parameters", f"{len(theirs)}"),
        )
        raise TensorMismatch(
            f"the model differs between ranks: rank {group.ranks[0]} has {_shown(first)}, rank {rank} {_shown(other)}; "
            "build the same model on every rank."
        )


def _shown(parameter: Any) -> str:
    if isinstance(parameter, str):
        return parameter
    name, dtype, shape, needs = parameter
    return f"{name} of {dtype} {shape}" + ("" if needs else " without gradient")
