"""Gradients of all ranks made one: the mean, in few messages."""

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
    """The mean of one gradient over ranks, in place. See `all_reduce_mean`."""
    return all_reduce_mean(gradient, group=group, async_op=async_op)


def sync_gradients(
    gradients: Iterable[torch.Tensor | torch.nn.Parameter | None],
    *,
    group: GroupLike = None,
    bucket_elements: int = _BUCKET_ELEMENTS,
) -> None:
    """The mean of many gradients over ranks, in place, in buckets: one message for many small ones.

    Args:
        gradients: Tensors, or parameters, whose `.grad` is meant; None and parameters without a gradient are left
            out, so every rank must have gradients for the same ones.
        group: The ranks that take part; None: all.
        bucket_elements: Elements of a bucket.

    Raises:
        TensorError: one is no tensor.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], GradientBucket] = {}
    begun = []
    for item in gradients:
        gradient = item.grad if isinstance(item, torch.nn.Parameter) else item
        if gradient is None:
            continue
        if not isinstance(gradient, torch.Tensor):
            raise TensorError(f"gradients: {gradient!r} is no tensor and no parameter.")
        kind = (gradient.dtype, gradient.device)
        bucket = open_buckets.setdefault(kind, GradientBucket(bucket_elements))
        if not bucket.fits(gradient) and bucket.num_gradients:
            begun.append((bucket, bucket.begin(group=group)))
            bucket = open_buckets[kind] = GradientBucket(bucket_elements)
        bucket.add(gradient)
    begun += [(bucket, bucket.begin(group=group)) for bucket in open_buckets.values() if bucket.num_gradients]
    for bucket, handle in begun:
        handle.wait()
        bucket.write_back()
