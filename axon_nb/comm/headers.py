"""The small header tensor sent before a tensor whose shape the receiver does not know."""

from __future__ import annotations

import torch

from axon_nb.comm.errors import TensorError

__all__ = ["SIZE", "pack", "unpack"]

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_MAX_DIMS = 12
_MARK = 0x41784F6E
SIZE = 3 + _MAX_DIMS
"""Number of elements (int64) of a header."""


def pack(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return the header of `tensor`; for None an empty one, to receive into.

    Raises:
        TensorError: the dtype is not supported, or the tensor has too many dimensions.
    """
    header = torch.zeros(SIZE, dtype=torch.int64)
    if tensor is None:
        return header
    if tensor.dtype not in _DTYPES:
        raise TensorError(f"a header cannot describe {tensor.dtype}; pass `out=` on the receiving ranks.")
    if tensor.ndim > _MAX_DIMS:
        raise TensorError(f"a header holds at most {_MAX_DIMS} dimensions; got {tensor.ndim}. Flatten the tensor.")
    header[: 3 + tensor.ndim] = torch.tensor([_MARK, _DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape])
    return header


def unpack(header: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an empty tensor as described by the header.

    Raises:
        TensorError: the received tensor is not a header.
    """
    mark, dtype, ndim, *shape = header.tolist()
    if mark != _MARK:
        raise TensorError("the sender sends no header; use `recv(src, out=…, header=False)`.")
    return torch.empty(shape[:ndim], dtype=_DTYPES[dtype], device=device)
