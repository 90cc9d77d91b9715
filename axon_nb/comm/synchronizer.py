"""Averaging the gradients of a model by hand: all at the end, or while backward still runs."""

from __future__ import annotations

import enum
from types import TracebackType

import torch
from torch import nn

from axon_nb.comm.bucket import GradientBucket
from axon_nb.comm.errors import CommError
from axon_nb.comm.group import GroupLike
from axon_nb.comm.handle import Handle

__all__ = ["GradSyncStrategy", "GradientSynchronizer"]


class GradSyncStrategy(enum.Enum):
    """When gradients are averaged."""

    SYNCHRONOUS = "synchronous"
    """All of them in `sync_all`."""
    OVERLAPPED = "overlapped"
    """Each bucket as soon as it is full; `sync_all` waits for what is still under way."""
    NO_SYNC = "no_sync"
    """Not at all, as when gradients are accumulated."""


class GradientSynchronizer:
    """Collects gradients in buckets and averages them over ranks.

    By hand: `prepare`, `add_gradient` for each, `sync_all`, `clear`. Or `attach(model)`: every parameter then adds its
    gradient by itself during backward, and `sync_all` before the optimizer's step is all that is left to do.

    Args:
        strategy: When gradients are averaged.
        bucket_size: Elements of a bucket (6,553,600 are 25 MiB of float32).
        group: The ranks that take part; None: all.
    """

    def __init__(
        self,
        strategy: GradSyncStrategy = GradSyncStrategy.OVERLAPPED,
        bucket_size: int = 6_553_600,
        *,
        group: GroupLike = None,
    ) -> None:
        self.strategy = strategy
        self.bucket_size = bucket_size
        self._group = group
        self._num_parameters: int | None = None
        self._added: set[int] = set()
        self._filling: dict[tuple[torch.dtype, torch.device], GradientBucket] = {}
        self._full: list[GradientBucket] = []
        self._under_way: list[tuple[GradientBucket, Handle]] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def prepare(self, num_parameters: int) -> None:
        """A new step with this many parameters begins."""
        self.clear()
        self._num_parameters = num_parameters

    def add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """The gradient of parameter `index` is there; it is changed in place by `sync_all`.

        Raises:
            CommError: there is no such parameter, or it has a gradient already.
        """
        if self._num_parameters is not None and not 0 <= index < self._num_parameters:
            raise CommError(
                f"parameter {index}: prepare({self._num_parameters}) announced 0 to {self._num_parameters - 1}."
            )
        if index in self._added:
            raise CommError(f"parameter {index} has added its gradient already: sync_all and clear end a step.")
        self._added.add(index)
        if self.strategy is GradSyncStrategy.NO_SYNC:
            return
        kind = (gradient.dtype, gradient.device)
        bucket = self._filling.setdefault(kind, GradientBucket(self.bucket_size))
        if not bucket.add(gradient):
            self._fill(bucket)
            bucket = self._filling[kind] = GradientBucket(self.bucket_size)
            bucket.add(gradient)

    def _fill(self, bucket: GradientBucket) -> None:
        if self.strategy is GradSyncStrategy.OVERLAPPED:
            self._under_way.append((bucket, bucket.begin(group=self._group)))
        else:
            self._full.append(bucket)

    def sync_all(self) -> None:
        """Average what is not averaged yet, and wait for all of it; every gradient then holds the mean over ranks."""
        for bucket in self._filling.values():
            if bucket.num_gradients:
                self._fill(bucket)
        self._filling = {}
        # A synchronous strategy sends one bucket, waits, and sends the next.
        for bucket in self._full:
            bucket.sync(group=self._group)
        for bucket, handle in self._under_way:
            handle.wait()
            bucket.write_back()
        self.clear()

    def clear(self) -> None:
        """Forget the step."""
        self._added, self._filling, self._full, self._under_way = set(), {}, [], []

    def attach(self, model: nn.Module) -> GradientSynchronizer:
        """Have every parameter of `model` add its gradient as soon as backward has made it."""
        self.detach()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.prepare(len(parameters))
        for index, parameter in enumerate(parameters):

            def ready(parameter: torch.Tensor, index: int = index) -> None:
                if parameter.grad is not None:
                    self.add_gradient(index, parameter.grad)

            self._hooks.append(parameter.register_post_accumulate_grad_hook(ready))
        return self

    def detach(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __enter__(self) -> GradientSynchronizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()
