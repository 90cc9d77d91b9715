"""Many gradients as one message."""

from __future__ import annotations

import torch

from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike
from axon_nb.comm.handle import Handle
from axon_nb.comm.reduce import all_reduce_mean

__all__ = ["GradientBucket"]


class GradientBucket:
    """Collects gradients until it is full; then one all_reduce serves them all.

    Args:
        capacity: Number of elements; a single gradient that is larger has a bucket of its own.

    Raises:
        TensorError: the capacity is below 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise TensorError(f"a bucket of {capacity} elements: it holds at least 1.")
        self.capacity = capacity
        self._gradients: list[torch.Tensor] = []
        self._flat: torch.Tensor | None = None

    @property
    def num_gradients(self) -> int:
        """How many gradients are in it."""
        return len(self._gradients)

    @property
    def num_elements(self) -> int:
        """How many elements they have."""
        return sum(gradient.numel() for gradient in self._gradients)

    def fits(self, gradient: torch.Tensor) -> bool:
        """Whether there is room for it."""
        return self.num_elements + gradient.numel() <= self.capacity

    def add(self, gradient: torch.Tensor) -> bool:
        """Add one gradient; False, and nothing added, when there is no room and others are in already.

        Raises:
            TensorError: its dtype or device differs from those in the bucket, or it is sparse.
        """
        if gradient.layout is not torch.strided:
            raise TensorError(f"a gradient of layout {gradient.layout}: buckets take dense ones; use to_dense().")
        if self._gradients:
            first = self._gradients[0]
            if (gradient.dtype, gradient.device) != (first.dtype, first.device):
                raise TensorError(
                    f"a gradient of {gradient.dtype} on {gradient.device} in a bucket of {first.dtype} on "
                    f"{first.device}: one bucket for each kind."
                )
            if not self.fits(gradient):
                return False
        self._gradients.append(gradient.detach())
        self._flat = None
        return True

    def begin(self, *, group: GroupLike = None) -> Handle:
        """Begin to average all of them over ranks; wait for the handle, then `write_back` or `extract`."""
        self._flat = torch.cat([gradient.reshape(-1) for gradient in self._gradients])
        handle = all_reduce_mean(self._flat, group=group, async_op=True)
        assert isinstance(handle, Handle)
        return handle

    def sync(self, *, group: GroupLike = None) -> None:
        """Average all of them over ranks, in place."""
        if self._gradients:
            self.begin(group=group).wait()
            self.write_back()

    def write_back(self) -> None:
        """Put the averages into the gradients that were added."""
        for gradient, part in zip(self._gradients, self._parts(), strict=True):
            gradient.copy_(part)

    def extract(self) -> list[torch.Tensor]:
        """What the gradients are now, in the order in which they were added, each in its shape; the bucket is empty."""
        parts = [part.clone() for part in self._parts()] if self._flat is not None else list(self._gradients)
        self.clear()
        return parts

    def clear(self) -> None:
        """Forget everything."""
        self._gradients, self._flat = [], None

    def _parts(self) -> list[torch.Tensor]:
        if self._flat is None:
            return list(self._gradients)
        sizes = [gradient.numel() for gradient in self._gradients]
        pieces = self._flat.split(sizes)
        return [piece.view(gradient.shape) for piece, gradient in zip(pieces, self._gradients, strict=True)]
