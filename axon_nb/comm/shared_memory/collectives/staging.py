"""Tensors as addresses of contiguous CPU memory; other tensors are copied."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from axon_nb.comm.errors import TensorError, TensorMismatchError


class Staged:
    """The elements of a tensor as one contiguous block of memory.

    Args:
        tensor: The tensor: dense, of a class that holds its elements itself.
        reads: Whether its current elements are needed.

    Raises:
        TensorError: it has no memory in this process, or less than its elements take.
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
        self.address = _address(tensor) if self.size else 0

    def store(self) -> None:
        """Copy the block back into the tensor if it is a copy."""
        if self._copy is not None:
            with torch.inference_mode():  # inference tensors can be changed only here
                self._tensor.copy_(self._copy)


def stage(tensor: torch.Tensor, *, reads: bool = True, writes: bool | None = None) -> Staged:
    """Return the block of memory of a tensor.

    Args:
        tensor: Any tensor.
        reads: Whether its current elements are needed.
        writes: Whether `store` will change it; None: if its elements are not needed.

    Raises:
        TensorError: it is not dense, has no memory here, or several of its elements share memory that is written to.
    """
    if type(tensor) is not torch.Tensor:
        tensor = _unwrapped(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        kind = next((name for name in ("nested", "quantized", "meta") if getattr(tensor, f"is_{name}")), tensor.layout)
        raise TensorError(f"A tensor must be dense and have memory to be communicated; got a tensor that is {kind}.")
    if (not reads if writes is None else writes) and not tensor.is_contiguous() and _overlaps(tensor):
        raise TensorError("Elements of an expanded tensor share memory: communicate a copy, such as x.contiguous().")
    return Staged(tensor, reads=reads)


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the elements; wait for it if it is the result of a functional collective.

    Raises:
        TensorError: none does in this process alone, as with a DTensor.
    """
    if (wait := getattr(tensor, "trigger_wait", None)) is not None:  # AsyncCollectiveTensor, whose module is private
        held: torch.Tensor = wait()
        return held
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return tensor
    local = " Use .to_local() or .full_tensor()." if hasattr(tensor, "to_local") else ""
    raise TensorError(f"A {type(tensor).__name__} cannot be communicated: it wraps other tensors.{local}")


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as `expand` makes them; torch checks no more before it copies into a tensor."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a contiguous tensor's first element.

    Raises:
        TensorError: the tensor has no memory, or its storage was freed or shrunk.
    """
    try:
        address = tensor.data_ptr()
        held = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    except RuntimeError as error:  # such as that of a function that torch.func transforms
        raise TensorError(f"A {type(tensor).__name__} has no memory that can be communicated: {error}") from None
    if not address or held < tensor.nbytes:
        raise TensorError(
            f"A tensor of {tensor.nbytes:,} bytes has {max(held, 0) if address else 0:,} bytes of memory: its storage "
            "was freed or resized."
        )
    return address


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


def check_sizes(name: str, parts: Sequence[torch.Tensor], size: int, ranks: int, *, only: int = -1) -> None:
    """Raise if a list does not have one tensor of `size` bytes per rank; `only`: the tensors of others may differ."""
    if len(parts) != ranks:
        raise TensorMismatchError(f"{name} needs {ranks} tensors, one per rank; got {len(parts)}.")
    for rank, part in enumerate(parts):
        if part.nbytes != size and only in (-1, rank):
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
