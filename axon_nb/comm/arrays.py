"""View tensors, NumPy and CuPy arrays as torch tensors that share their memory."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from axon_nb.comm.errors import TensorError

__all__ = ["Array", "as_input_type", "as_tensor"]

_KINDS = "torch.Tensor, a NumPy array or a CuPy array"
Array = Any
"""A `torch.Tensor`, `numpy.ndarray` or `cupy.ndarray`."""


def as_tensor(array: Array, name: str = "tensor") -> torch.Tensor:
    """Return a tensor that shares the memory of `array`: writing to it changes the array.

    Raises:
        TensorError: `array` is not an array, is read-only, or has a dtype or layout that torch does not support.
    """
    if type(array) is torch.Tensor or isinstance(array, torch.Tensor):
        if array.layout is not torch.strided:
            raise TensorError(f"{name} has layout {array.layout}; collectives need a dense tensor, so use to_dense().")
        return array.detach() if array.requires_grad else array
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        return _from_numpy(array, name)
    if hasattr(array, "__dlpack__"):
        try:
            return from_dlpack(array)
        except (BufferError, RuntimeError, TypeError) as error:
            raise TensorError(f"{name}: torch cannot share the memory of this array: {error}.") from None
    raise TensorError(f"{name} must be a {_KINDS}; got {type(array).__name__}.")


def _from_numpy(array: Any, name: str) -> torch.Tensor:
    if not array.flags.writeable:
        raise TensorError(f"{name} is a read-only NumPy array, and results are written in place; pass a copy.")
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise TensorError(f"{name}: torch cannot share the memory of this NumPy array: {error}.") from None


def as_input_type(result: torch.Tensor, given: Array) -> Array:
    """Return `result` as the same kind of array as `given`."""
    if isinstance(given, torch.Tensor):
        return result
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(given, numpy.ndarray):
        return result.cpu().numpy()
    module = sys.modules.get(type(given).__module__.partition(".")[0])
    return module.from_dlpack(result) if module is not None and hasattr(module, "from_dlpack") else result
