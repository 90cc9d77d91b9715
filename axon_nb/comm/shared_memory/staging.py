"""Tensors as addresses of contiguous CPU memory, copied where they are not that."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from axon_nb.comm.errors import TensorError

__all__ = ["Staged", "flat_buffer", "scratch_buffer", "stage", "stage_all"]


class Staged:
    """A tensor's elements in one piece of memory.

    Args:
        tensor: The tensor.
        reads: Whether its elements are needed.
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
        """Put what was written to the memory into the tensor."""
        if self._copy is not None:
            with torch.inference_mode():  # also where the tensor is one of those that cannot be changed elsewhere
                self._tensor.copy_(self._copy)


def stage(tensor: torch.Tensor, *, reads: bool = True) -> Staged:
    """The tensor's memory.

    Raises:
        TensorError: it is sparse or has no memory.
    """
    if tensor.layout is not torch.strided:
        raise TensorError(f"A tensor must be dense to be communicated; got layout {tensor.layout}.")
    return Staged(tensor, reads=reads)


def stage_all(tensors: list[torch.Tensor], *, reads: bool = True) -> list[Staged]:
    """The memory of each tensor."""
    return [stage(tensor, reads=reads) for tensor in tensors]


class _Memory:
    """What NumPy makes an array of without torch noticing."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def flat_buffer(staged: Staged) -> Any:
    """The same memory as a buffer of bytes; the tensor must be kept alive."""
    return np.asarray(_Memory(staged.address, staged.size)) if staged.size else bytearray()


def scratch_buffer(size: int) -> tuple[Any, int]:
    """Memory of this process: a buffer and its address."""
    memory = (ctypes.c_char * size)()
    return memory, ctypes.addressof(memory)
