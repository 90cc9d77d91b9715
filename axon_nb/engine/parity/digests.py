"""Digests of tensors: norm, largest value and random projections, which need the same memory for any size."""

from __future__ import annotations

import math

import torch

from axon_nb.comm.placements import placed
from axon_nb.records.training.comparison import Bounds, Digest, Place

_COUNT, _BLOCK = 16, 4096
_SEED = 20506


class Projector:
    """Computes digests, with the same random signs on every rank and in every run."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        signs = torch.randint(0, 2, (2, _COUNT, _BLOCK), generator=generator, device="cpu")
        self._signs = signs.double() * 2 - 1

    @torch.no_grad()
    def digest(self, tensor: torch.Tensor) -> Digest:
        """Return the digest of a tensor; numbers that are not finite count as 0."""
        flat = tensor.detach().reshape(-1).to("cpu", torch.float64)
        is_finite = bool(torch.isfinite(flat).all())
        if not is_finite:
            flat = torch.nan_to_num(flat, 0.0, 0.0, 0.0)
        if not flat.numel():
            return Digest(0.0, 0.0, True, (0.0,) * _COUNT)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % _BLOCK)).view(-1, _BLOCK)
        # A block has its own sign in each projection, so that equal blocks do not add up.
        of_blocks = self._signs[1].T.repeat(math.ceil(len(padded) / _BLOCK), 1)[: len(padded)]
        projections = ((padded @ self._signs[0].T) * of_blocks).sum(0)
        return Digest(float(flat.norm()), float(flat.abs().max()), is_finite, tuple(projections.tolist()))


def epsilon_of(tensor: torch.Tensor) -> float:
    """Return the relative spacing of a tensor's numbers; 0 for integers."""
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, Bounds | None]:
    """Return what this rank holds of a tensor, and which part that is; None: nothing says so."""
    found = placed(tensor)
    if found is None or any(placement.is_partial() for placement in found.placements):
        return tensor, None
    from axon_nb.engine.sharding.placement import placement_of

    offset = placement_of(tensor).offset
    ends = (start + size for start, size in zip(offset, found.local.shape, strict=True))
    return found.local, tuple(zip(offset, ends, strict=True))


def part_of(
    shape: tuple[int, ...], whole: tuple[int, ...], place: Place, *, of_batch: bool, call: int
) -> Bounds | None:
    """Return which part of the reference's tensor a rank computed, from the shapes; None if they do not fit.

    Args:
        shape: Shape of the rank's tensor.
        whole: Shape of the reference's tensor.
        place: The rank's place.
        of_batch: Whether the first dimension may be that of the batch.
        call: Which microbatch of the rank's part of the batch.
    """
    if len(shape) != len(whole):
        return None
    bounds = []
    for dim, (size, length) in enumerate(zip(shape, whole, strict=True)):
        if of_batch and dim == 0 and (start := _batch_start(size, length, place, call)) is not None:
            bounds.append((start, start + size))
        elif size == length:
            bounds.append((0, length))
        elif size * place.count == length:
            bounds.append((place.index * size, (place.index + 1) * size))
        else:
            return None
    return tuple(bounds)


def _batch_start(size: int, length: int, place: Place, call: int) -> int | None:
    """Return where a rank's part of the batch starts; None if the first dimension is not that of a batch."""
    if not size or length * place.length % place.total or length * place.start % place.total:
        return None
    rows = length * place.length // place.total
    if size == length or rows % size:
        return None
    return length * place.start // place.total + call % (rows // size) * size


def microbatches(shape: tuple[int, ...], whole: tuple[int, ...], place: Place) -> int:
    """Return in how many calls a rank computed its part of what the reference computed in one."""
    if not shape or len(shape) != len(whole) or not shape[0] or whole[0] * place.length % place.total:
        return 1
    rows = whole[0] * place.length // place.total
    return rows // shape[0] if rows and rows % shape[0] == 0 else 1
