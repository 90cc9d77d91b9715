"""Tensors, NumPy and CuPy arrays as what is communicated: the same memory, whatever it is called."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from axon_nb.comm.errors import TensorError

__all__ = ["Array", "as_tensor", "like_given"]

_KINDS = "torch.Tensor, a NumPy array or a CuPy array"
Array = Any
"""A `torch.Tensor`, `numpy.ndarray` or `cupy.ndarray`."""


def as_tensor(array: Array, name: str = "tensor") -> torch.Tensor:
    """A tensor on the memory of `array`; what is written to it is seen in the array.

    Raises:
        TensorError: it is no array, cannot be written, or has a dtype or layout that torch does not know.
    """
    if type(array) is torch.Tensor or isinstance(array, torch.Tensor):
        if array.layout is not torch.strided:
            raise TensorError(f"{name} has layout {array.layout}: collectives take dense tensors; use to_dense().")
        return array.detach() if array.requires_grad else array
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        return _from_numpy(array, name)
    if hasattr(array, "__dlpack__"):
        try:
            return from_dlpack(array)
        except (BufferError, RuntimeError, TypeError) as error:
            raise TensorError(f"{name} cannot be shared with torch: {error}.") from None
    raise TensorError(f"{name} is a {type(array).__name__}: it must be a {_KINDS}.")


def _from_numpy(array: Any, name: str) -> torch.Tensor:
    if not array.flags.writeable:
        raise TensorError(f"{name} is a NumPy array that cannot be written, and results come in place: copy it first.")
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise TensorError(f"{name} is a NumPy array that torch cannot share: {error}.") from None


def like_given(result: torch.Tensor, given: Array) -> Array:
    """A new result in the kind of array that was given."""
    if isinstance(given, torch.Tensor):
        return result
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(given, numpy.ndarray):
        return result.cpu().numpy()
    module = sys.modules.get(type(given).__module__.partition(".")[0])
    return module.from_dlpack(result) if module is not None and hasattr(module, "from_dlpack") else result
