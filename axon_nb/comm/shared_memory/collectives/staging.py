"""Tensors as addresses of contiguous CPU memory; other tensors are copied."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from axon_nb.comm.errors import TensorError, TensorMismatchError

__all__ = [
    "Staged",
    "check_sizes",
    "check_whole",
    "flat_buffer",
    "scratch_buffer",
    "split_bytes",
    "stage",
    "stage_all",
]


class Staged:
    """The elements of a tensor as one contiguous block of memory.

    Args:
        tensor: The tensor.
        reads: Whether its current elements are needed.
    """

    __slots__ = ("_copy", "_tensor", "address", "count", "size")

    def __init__(self, tensor: torch.Tensor, *, reads: bool) -> None:
        self._tensor = tensor
        self._copy: torch.Tensor | None = None
        self.count = tensor.numel()
        """Number of elements."""
        self.size = self.count * tensor.element_size()
        """Bytes."""
        if not (tensor.is_contiguous() and tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg())):
            with torch.no_grad():
                self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                if reads:
                    self._copy.copy_(tensor)
            tensor = self._copy
        self.address = tensor.data_ptr()

    def store(self) -> None:
        """Copy the block back into the tensor if it is a copy."""
        if self._copy is not None:
            with torch.inference_mode():  # inference tensors can be changed only here
                self._tensor.copy_(self._copy)


def stage(tensor: torch.Tensor, *, reads: bool = True) -> Staged:
    """Return the block of memory of a tensor.

    Raises:
        TensorError: it is sparse or has no memory.
    """
    if tensor.layout is not torch.strided:
        raise TensorError(f"A tensor must be dense to be communicated; got layout {tensor.layout}.")
    return Staged(tensor, reads=reads)


def stage_all(tensors: list[torch.Tensor], *, reads: bool = True) -> list[Staged]:
    """Return the blocks of several tensors."""
    return [stage(tensor, reads=reads) for tensor in tensors]


class _Memory:
    """An object that NumPy turns into an array without involving torch."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def flat_buffer(staged: Staged) -> Any:
    """Return the block as a buffer of bytes; the caller keeps the tensor alive."""
    return np.asarray(_Memory(staged.address, staged.size)) if staged.size else bytearray()


def scratch_buffer(size: int) -> tuple[Any, int]:
    """Allocate memory in this process: a buffer and its address."""
    memory = (ctypes.c_char * size)()
    return memory, ctypes.addressof(memory)


def split_bytes(tensor: torch.Tensor, splits: Sequence[int], ranks: int) -> list[int]:
    """Return the number of bytes per rank in a tensor that is split by rows; without splits, equal parts.

    Raises:
        TensorMismatchError: the splits do not add up to the tensor's rows.
    """
    rows = tensor.shape[0] if tensor.ndim else 1
    if not splits:
        if rows % ranks:
            raise TensorMismatchError(f"all_to_all: the number of rows ({rows}) must be divisible by {ranks} ranks.")
        return [tensor.nbytes // ranks] * ranks
    if len(splits) != ranks or sum(splits) != rows:
        raise TensorMismatchError(
            f"all_to_all: split sizes must be {ranks} numbers with the sum {rows} (rows); got {list(splits)}."
        )
    row = tensor.nbytes // rows if rows else 0
    return [count * row for count in splits]


def check_sizes(name: str, parts: Sequence[torch.Tensor], size: int, ranks: int) -> None:
    """Raise if a list does not have one tensor of `size` bytes per rank."""
    if len(parts) != ranks:
        raise TensorMismatchError(f"{name} needs {ranks} tensors, one per rank; got {len(parts)}.")
    for rank, part in enumerate(parts):
        if part.nbytes != size:
            raise TensorMismatchError(
                f"{name}: the tensor for rank {rank} has {part.nbytes:,} bytes; must be {size:,}."
            )


def check_whole(name: str, whole: torch.Tensor, part: torch.Tensor, ranks: int) -> None:
    """Raise if a tensor does not have `ranks` times the elements of another."""
    if whole.dtype is not part.dtype:
        raise TensorError(f"{name}: the tensors must have one dtype; got {whole.dtype} and {part.dtype}.")
    if whole.numel() != part.numel() * ranks:
        expected = f"{part.numel() * ranks:,}"
        raise TensorMismatchError(f"{name}: the large tensor must have {expected} elements; got {whole.numel():,}.")
