"""Reductions in rank order: the result has the same bits on all ranks and in every run, whoever arrives first.

NumPy does what it can: its calls are short and invisible to torch's modes. torch does the rest: 16-bit types are summed
in float32 and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from axon_nb.comm.errors import TensorError
from axon_nb.comm.shared_memory.segment.announcement import REDUCE_OPERATIONS, note_unlike_gloo

Arrays = Sequence[Any]

_SUM, _AVG, _PRODUCT, _MIN, _MAX, _BAND, _BOR, _BXOR, _PREMUL = range(9)
_KERNELS: dict[int, Any] = {
    _SUM: np.add,
    _AVG: np.add,
    _PRODUCT: np.multiply,
    _MIN: np.minimum,
    _MAX: np.maximum,
    _BAND: np.bitwise_and,
    _BOR: np.bitwise_or,
    _BXOR: np.bitwise_xor,
    _PREMUL: np.add,
}
_TORCH_KERNELS: dict[int, Any] = {
    _SUM: torch.add,
    _AVG: torch.add,
    _PRODUCT: torch.mul,
    _MIN: torch.minimum,
    _MAX: torch.maximum,
    _PREMUL: torch.add,
}
_BLOCK = 1 << 15
"""Elements that are summed in float32 at a time."""
_WIDENED = (torch.bfloat16, torch.float16)
_NUMPY = {
    dtype: np.dtype(str(dtype).removeprefix("torch.").replace("bool", "bool_").rstrip("_"))
    for dtype in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
}


class Arithmetic:
    """How one dtype is reduced with one operation.

    Args:
        dtype: The dtype of the tensors.
        operation: Number of the reduce operation.
        size: Number of ranks.

    Raises:
        TensorError: the operation is not defined for the dtype.
    """

    def __init__(self, dtype: torch.dtype, operation: int, size: int) -> None:
        if not is_defined(dtype, operation):
            raise TensorError(f"{REDUCE_OPERATIONS[operation]} is not defined for {str(dtype).removeprefix('torch.')}.")
        note_unlike_gloo("", dtype, REDUCE_OPERATIONS[operation])
        self._dtype, self._size = dtype, size
        self._numpy = _NUMPY.get(dtype)
        self._kernel = _KERNELS[operation]
        self._torch_kernel: Any = _TORCH_KERNELS.get(operation)
        self._average = operation == _AVG
        self.reduce: Callable[[Any, Sequence[tuple[Any, int]], int], None] = (
            self._with_torch if self._numpy is None else self._with_numpy
        )
        """Reduce `count` elements at (buffer, offset in bytes) of each source, in this order, into a target."""

    def _with_numpy(self, target: tuple[Any, int], sources: Sequence[tuple[Any, int]], count: int) -> None:
        dtype, kernel = self._numpy, self._kernel
        parts = [np.frombuffer(buffer, dtype, count, offset) for buffer, offset in sources]
        out = np.frombuffer(target[0], dtype, count, target[1])
        with np.errstate(all="ignore"):
            if len(parts) == 1:
                out[:] = parts[0]
            else:
                kernel(parts[0], parts[1], out=out)
            for part in parts[2:]:
                kernel(out, part, out=out)
            if self._average:
                self._divide(out)

    def _divide(self, out: Any) -> None:
        if out.dtype.kind in "fc":
            np.divide(out, self._size, out=out)
        else:  # towards zero, as in C
            out[:] = np.sign(out) * (np.abs(out) // self._size) if out.dtype.kind == "i" else out // self._size

    def _with_torch(self, target: tuple[Any, int], sources: Sequence[tuple[Any, int]], count: int) -> None:
        parts = [torch.frombuffer(buffer, dtype=self._dtype, count=count, offset=offset) for buffer, offset in sources]
        result = torch.frombuffer(target[0], dtype=self._dtype, count=count, offset=target[1])
        if len(parts) == 2 and not self._average:  # torch's kernels compute in float32, and round once
            self._torch_kernel(*parts, out=result)
            return
        for begin in range(0, count, _BLOCK):  # a block stays in the cache from its conversion to its rounding
            block = slice(begin, begin + _BLOCK)
            total = parts[0][block].float()
            for part in parts[1:]:
                self._torch_kernel(total, part[block].float(), out=total)
            if self._average:
                total /= self._size
            result[block].copy_(total)


def is_defined(dtype: torch.dtype, operation: int) -> bool:
    """Whether a dtype can be reduced with an operation."""
    if operation in (_BAND, _BOR, _BXOR):
        return dtype in _NUMPY and not dtype.is_floating_point and not dtype.is_complex
    if operation in (_MIN, _MAX) and dtype.is_complex:
        return False
    if operation in (_AVG, _PREMUL) and dtype is torch.bool:
        return False
    return dtype in _NUMPY or dtype in _WIDENED


@functools.lru_cache(256)
def arithmetic(dtype: torch.dtype, operation: int, size: int) -> Arithmetic:
    """Return the `Arithmetic` for these arguments."""
    return Arithmetic(dtype, operation, size)
