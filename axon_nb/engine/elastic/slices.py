"""Sends parts of tensors to the ranks that hold them in a world of another size, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def slice_of(length: int, size: int, index: int) -> tuple[int, int]:
    """Return start and end of a rank's part of `length` elements, as `torch.chunk` splits them over `size` ranks."""
    step = -(-length // size)
    start = min(length, index * step)
    return start, min(length, start + step)


@torch.no_grad()
def reshard(
    local: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    dim: int,
    old_size: int,
    new_size: int,
    device: torch.device,
) -> torch.Tensor:
    """Return this rank's part of a tensor in the new world; collective over the ranks of both worlds.

    Args:
        local: This rank's part in the old world; None if it was not there.
        shape: Shape of the full tensor.
        dtype: Its dtype.
        dim: The dimension that is split.
        old_size: Number of ranks before.
        new_size: Number of ranks afterwards.
        device: Where the part is made.

    Returns:
        The part; without elements if this rank leaves.
    """
    rank, length = dist.get_rank(), shape[dim]

    def part(size: int, index: int) -> tuple[int, int]:
        return slice_of(length, size, index) if index < size else (0, 0)

    start, end = part(new_size, rank)
    result = torch.empty((*shape[:dim], end - start, *shape[dim + 1 :]), dtype=dtype, device=device)
    works: list[Any] = []
    received: list[tuple[torch.Tensor, torch.Tensor]] = []
    for peer in range(old_size):
        first, last = _overlap(part(old_size, peer), (start, end))
        if first < last:
            place = result.narrow(dim, first - start, last - first)
            if peer == rank and local is not None:
                place.copy_(local.narrow(dim, first - part(old_size, rank)[0], last - first))
            elif place.numel():
                buffer = torch.empty_like(place, memory_format=torch.contiguous_format)
                works.append(dist.irecv(buffer, peer))
                received.append((place, buffer))
    bounds = part(old_size, rank)
    for peer in range(new_size):
        first, last = _overlap(bounds, part(new_size, peer))
        if first < last and peer != rank and local is not None:
            piece = local.narrow(dim, first - bounds[0], last - first).contiguous()
            if piece.numel():
                works.append(dist.isend(piece, peer))
    for work in works:
        work.wait()
    for place, buffer in received:
        place.copy_(buffer)
    return result


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])


@torch.no_grad()
def move(
    tensor: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    source: int,
    targets: Sequence[int],
    device: torch.device,
) -> torch.Tensor | None:
    """Send a tensor from one rank to others; collective over these ranks.

    Args:
        tensor: The tensor, on rank `source`.
        shape: Its shape.
        dtype: Its dtype.
        source: The rank that has it.
        targets: The ranks that need it; may include `source`.
        device: Where the other ranks make it.

    Returns:
        The tensor on the ranks that need it, None on all others.
    """
    rank = dist.get_rank()
    if rank == source and tensor is not None:
        works = [dist.isend(tensor.contiguous(), peer) for peer in targets if peer != rank and tensor.numel()]
        for work in works:
            work.wait()  # type: ignore[union-attr]
    elif rank in targets:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        if tensor.numel():
            dist.recv(tensor, source)
    return tensor if rank in targets else None
