"""Average gradients over ranks, in few messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from axon_nb.comm.bucket import GradientBucket
from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike
from axon_nb.comm.reduce import all_reduce_mean

__all__ = ["sync_gradient", "sync_gradients"]

_BUCKET_ELEMENTS = 6_553_600  # 25 MiB of float32, as DDP's default


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
