"""Average a model's gradients by hand: all at the end, or while backward is still running."""

from __future__ import annotations

import enum
from types import TracebackType

import torch
from torch import nn

from axon_nb.comm.errors import InvalidArgumentError
from axon_nb.comm.gradients import GradientBucket
from axon_nb.comm.group import GroupLike
from axon_nb.comm.types import Handle


class GradSyncStrategy(enum.Enum):
    """When gradients are averaged."""

    SYNCHRONOUS = "synchronous"
    """All at once, in `sync_all`."""
    OVERLAPPED = "overlapped"
    """Each bucket as soon as it is full; `sync_all` waits for those in progress."""
    NO_SYNC = "no_sync"
    """Never, as when accumulating gradients."""


class GradientSynchronizer:
    """Collects gradients in buckets and averages them over ranks.

    By hand: `prepare`, `add_gradient` for each parameter, `sync_all`, `clear`. Or `attach(model)`: each parameter then
    adds its gradient during backward, and only `sync_all` before the optimizer step remains to be called.

    Args:
        strategy: When gradients are averaged.
        bucket_size: Elements per bucket (6,553,600 are 25 MiB of float32).
        group: The participating ranks; None means all.
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
        self._open: dict[tuple[torch.dtype, torch.device], GradientBucket] = {}
        self._full: list[GradientBucket] = []
        self._in_progress: list[tuple[GradientBucket, Handle]] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def prepare(self, num_parameters: int) -> None:
        """Start a new step with this many parameters."""
        self.clear()
        self._num_parameters = num_parameters

    def add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Add the gradient of parameter `index`; `sync_all` averages it in place.

        Raises:
            InvalidArgumentError: the index is out of range, or this parameter has already added a gradient.
        """
        if self._num_parameters is not None and not 0 <= index < self._num_parameters:
            raise InvalidArgumentError(
                f"add_gradient: index must be 0 to {self._num_parameters - 1}, as prepare({self._num_parameters}) "
                f"declared; got {index}."
            )
        if index in self._added:
            raise InvalidArgumentError(
                f"Parameter {index} has already added its gradient; call sync_all and clear after a step."
            )
        self._added.add(index)
        if self.strategy is GradSyncStrategy.NO_SYNC:
            return
        kind = (gradient.dtype, gradient.device)
        bucket = self._open.setdefault(kind, GradientBucket(self.bucket_size))
        if not bucket.add(gradient):
            self._flush(bucket)
            bucket = self._open[kind] = GradientBucket(self.bucket_size)
            bucket.add(gradient)

    def _flush(self, bucket: GradientBucket) -> None:
        if self.strategy is GradSyncStrategy.OVERLAPPED:
            self._in_progress.append((bucket, bucket.start(group=self._group)))
        else:
            self._full.append(bucket)

    def sync_all(self) -> None:
        """Average all remaining gradients and wait: afterwards every gradient holds the mean over ranks."""
        for bucket in self._open.values():
            if bucket.num_gradients:
                self._flush(bucket)
        self._open = {}
        # The synchronous strategy sends one bucket, waits, and sends the next.
        for bucket in self._full:
            bucket.sync(group=self._group)
        for bucket, handle in self._in_progress:
            handle.wait()
            bucket.write_back()
        self.clear()

    def clear(self) -> None:
        """Drop all gradients of the step."""
        self._added, self._open, self._full, self._in_progress = set(), {}, [], []

    def attach(self, model: nn.Module) -> GradientSynchronizer:
        """Make each parameter of `model` add its gradient as soon as backward has computed it."""
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
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __enter__(self) -> GradientSynchronizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()
