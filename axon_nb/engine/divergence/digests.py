"""Digests of tensors on their own device; nothing here waits for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_WORD_BYTES = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def is_comparable(tensor: torch.Tensor) -> bool:
    """Whether its memory holds all of its numbers, once each."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's 64-bit words, modulo 2**64: any single bit that differs changes it.

    Args:
        tensor: Strided, of any shape and data type.

    Returns:
        An int64 of shape () on the same device.
    """
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    per_word = max(1, _WORD_BYTES // size)
    if flat.storage_offset() % per_word:
        flat = flat.clone()  # a word must begin at a multiple of its size
    whole = flat.numel() // per_word * per_word
    total = flat[:whole].view(torch.int64).sum()
    if whole < flat.numel():
        total = total + flat[whole:].view(_INTEGERS[size]).sum()
    return total


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of some tensors together, which is finite if all of their numbers are, unless they are huge.

    Returns:
        A float64 of shape () on the device of the first.
    """
    dense = [tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor for tensor in tensors]
    return torch.nn.utils.get_total_norm(dense).double()
