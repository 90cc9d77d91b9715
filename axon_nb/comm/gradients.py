"""Averages gradients over ranks in few messages: many gradients share one bucket."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from axon_nb.comm.collectives.reduction import all_reduce_mean
from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike
from axon_nb.comm.types import Handle

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
        """Add one gradient. Returns False, and adds nothing, if a non-empty bucket has no room for it.

        Raises:
            TensorError: the dtype or device differs from those in the bucket, or the gradient is sparse.
        """
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
        self._gradients.append(gradient.detach())
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
            so every rank must have gradients for the same ones.
        group: The participating ranks; None means all.
        bucket_elements: Elements per bucket.

    Raises:
        TensorError: an item is not a tensor.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], GradientBucket] = {}
    started = []
    for item in gradients:
        gradient = item.grad if isinstance(item, torch.nn.Parameter) else item
        if gradient is None:
            continue
        if not isinstance(gradient, torch.Tensor):
            raise TensorError(f"gradients must be tensors or parameters; got {gradient!r}.")
        kind = (gradient.dtype, gradient.device)
        bucket = open_buckets.setdefault(kind, GradientBucket(bucket_elements))
        if not bucket.fits(gradient) and bucket.num_gradients:
            started.append((bucket, bucket.start(group=group)))
            bucket = open_buckets[kind] = GradientBucket(bucket_elements)
        bucket.add(gradient)
    started += [(bucket, bucket.start(group=group)) for bucket in open_buckets.values() if bucket.num_gradients]
    for bucket, handle in started:
        handle.wait()
        bucket.write_back()
