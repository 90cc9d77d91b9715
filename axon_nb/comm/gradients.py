"""Averages gradients over ranks by hand: in few messages, all at the end or while backward is still running.

Many gradients share one bucket.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from axon_nb.comm.collectives.reduction import all_reduce_mean
from axon_nb.comm.errors import InvalidArgumentError, TensorError
from axon_nb.comm.group import GroupLike, Handle

_BUCKET_ELEMENTS = 6_553_600  # 25 MiB of float32, as DDP's default


class GradientBucket:
    """Collects gradients up to a capacity, then averages all of them with one all_reduce.

    Args:
        capacity: Number of elements. A single larger gradient still fits into an empty bucket.

    Raises:
        TensorError: `capacity` is below 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise TensorError(f"capacity must be at least 1 element; got {capacity}.")
        self.capacity = capacity
        self._gradients: list[torch.Tensor] = []
        self._flat: torch.Tensor | None = None

    @property
    def num_gradients(self) -> int:
        """Number of gradients in the bucket."""
        return len(self._gradients)

    @property
    def num_elements(self) -> int:
        """Number of elements in the bucket."""
        return sum(gradient.numel() for gradient in self._gradients)

    def fits(self, gradient: torch.Tensor) -> bool:
        """Whether the bucket has room for `gradient`."""
        return self.num_elements + gradient.numel() <= self.capacity

    def add(self, gradient: torch.Tensor) -> bool:
        """Add one gradient, of a DTensor this rank's part.

        Returns False, and adds nothing, if a non-empty bucket has no room for it.

        Raises:
            TensorError: the dtype or device differs from those in the bucket, or the gradient is sparse.
        """
        gradient = gradient.detach()
        if (local := getattr(gradient, "to_local", None)) is not None:
            gradient = local()
        if gradient.layout is not torch.strided:
            raise TensorError(f"buckets need dense gradients; got layout {gradient.layout}. Use to_dense().")
        if self._gradients:
            first = self._gradients[0]
            if (gradient.dtype, gradient.device) != (first.dtype, first.device):
                raise TensorError(
                    f"a bucket holds gradients of one dtype and device: this one holds {first.dtype} on "
                    f"{first.device}; got {gradient.dtype} on {gradient.device}. Use another bucket."
                )
            if not self.fits(gradient):
                return False
        self._gradients.append(gradient)
        self._flat = None
        return True

    def start(self, *, group: GroupLike = None) -> Handle:
        """Start averaging over ranks. Wait for the handle, then call `write_back` or `extract`."""
        self._flat = torch.cat([gradient.reshape(-1) for gradient in self._gradients])
        handle = all_reduce_mean(self._flat, group=group, async_op=True)
        assert isinstance(handle, Handle)
        return handle

    def sync(self, *, group: GroupLike = None) -> None:
        """Average all gradients over ranks, in place."""
        if self._gradients:
            self.start(group=group).wait()
            self.write_back()

    def write_back(self) -> None:
        """Copy the averages into the gradients that were added."""
        for gradient, part in zip(self._gradients, self._parts(), strict=True):
            gradient.copy_(part)

    def extract(self) -> list[torch.Tensor]:
        """Empty the bucket; return the current values in the order of `add`, each in its original shape."""
        parts = [part.clone() for part in self._parts()] if self._flat is not None else list(self._gradients)
        self.clear()
        return parts

    def clear(self) -> None:
        """Drop all gradients."""
        self._gradients, self._flat = [], None

    def _parts(self) -> list[torch.Tensor]:
        if self._flat is None:
            return list(self._gradients)
        sizes = [gradient.numel() for gradient in self._gradients]
        pieces = self._flat.split(sizes)
        return [piece.view(gradient.shape) for piece, gradient in zip(pieces, self._gradients, strict=True)]


def sync_gradient(gradient: Any, *, group: GroupLike = None, async_op: bool = False) -> Any:
    """Average one gradient over ranks, in place. See `all_reduce_mean`."""
    return all_reduce_mean(gradient, group=group, async_op=async_op)


def sync_gradients(
    gradients: Iterable[torch.Tensor | torch.nn.Parameter | None],
    *,
    group: GroupLike = None,
    bucket_elements: int = _BUCKET_ELEMENTS,
) -> None:
    """Average many gradients over ranks, in place, in buckets: one message for many small gradients.

    Args:
        gradients: Tensors, or parameters, whose `.grad` is used. None and parameters without a gradient are skipped,
            so every rank must have gradients for the same ones. Of DTensors, the ranks' parts are averaged: the ranks
            of `group` must hold the same part.
        group: The participating ranks; None means all.
        bucket_elements: Elements per bucket.

    Raises:
        TensorError: an item is not a tensor.
    """
    synchronizer = GradientSynchronizer(bucket_size=bucket_elements, group=group)
    for index, item in enumerate(gradients):
        gradient = item.grad if isinstance(item, torch.nn.Parameter) else item
        if gradient is None:
            continue
        if not isinstance(gradient, torch.Tensor):
            raise TensorError(f"gradients must be tensors or parameters; got {gradient!r}.")
        synchronizer.add_gradient(index, gradient)
    synchronizer.sync_all()


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

    def __exit__(self, *_: object) -> None:
        self.detach()
