"""The arguments of collectives: arrays as torch tensors, ready for the wire, and a check that all ranks agree.

Tensors, NumPy and CuPy arrays are viewed as torch tensors that share their memory. On the wire, tensors are dense and
have a dtype that every backend supports. The check before each collective, that all ranks make the same call, is
opt-in, as it costs one round trip.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch.utils.dlpack import from_dlpack

from axon_nb.comm.errors import CollectiveMismatchError, TensorError, TensorMismatchError
from axon_nb.comm.group import Backend, ProcessGroup, ReduceOp
from axon_nb.records.environment import CHECK

_KINDS = "torch.Tensor, a NumPy array or a CuPy array"
Array = Any
"""A `torch.Tensor`, `numpy.ndarray` or `cupy.ndarray`."""
# Dtypes that both Gloo and NCCL reduce and move (torch 2.11 to 2.13).
NATIVE = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Integer dtypes that no backend reduces, and a wider one that does. Overflow wraps around as in the narrow dtype."""
_DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)
_NAMES = (
    "all_reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "all_to_all",
    "gather_tensor",
    "scatter_tensor",
    "barrier",
)
_MAX_DIMS = 8
_FROM_START = CHECK.is_enabled()
# A context variable: the ranks of a mock world are threads, and each has its own setting.
_enabled = contextvars.ContextVar("axon_nb_check", default=_FROM_START)
is_checking = _enabled.get
"""Whether checks are on in this thread."""


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


def as_input_type(result: torch.Tensor, original: Array) -> Array:
    """Return `result` as the same kind of array as `original`."""
    if isinstance(original, torch.Tensor):
        return result
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(original, numpy.ndarray):
        return result.cpu().numpy()
    module = sys.modules.get(type(original).__module__.partition(".")[0])
    return module.from_dlpack(result) if module is not None and hasattr(module, "from_dlpack") else result


class WireTensor(Struct):
    """A tensor prepared for communication."""

    original: torch.Tensor
    buffer: torch.Tensor
    """The tensor that is communicated; `original` itself where possible."""
    op: ReduceOp | None = None
    """The operation that gives the right result on `buffer`."""

    @property
    def needs_gathered_product(self) -> bool:
        """Whether the values must be gathered and multiplied locally, because no backend can reduce them."""
        return self.op is ReduceOp.PRODUCT and self.buffer.is_complex()

    def copy_back(self, num_ranks: int = 1) -> torch.Tensor:
        """Copy the result back into `original`; divide here if the operation is an average."""
        original, buffer = self.original, self.buffer
        if self.op is ReduceOp.AVERAGE and num_ranks > 1:
            buffer.div_(num_ranks)
        if buffer.data_ptr() != original.data_ptr():  # else the same memory, viewed in another dtype
            original.copy_(self.restore(buffer))
        return original

    def restore(self, buffer: torch.Tensor) -> torch.Tensor:
        """Convert `buffer` (whole rows in wire format) to the dtype and row shape of `original`."""
        original = self.original
        if buffer.dtype is original.dtype:
            return buffer.view(original.shape) if buffer.numel() == original.numel() else buffer
        if original.is_complex() and buffer.is_floating_point():
            return torch.view_as_complex(buffer.view(-1, 2)).view(-1, *original.shape[1:] if original.ndim else ())
        if self.op is None:
            rows = buffer.reshape(-1).view(original.dtype)
            return rows.view(original.shape) if rows.numel() == original.numel() else rows.view(-1, *original.shape[1:])
        return buffer.to(original.dtype)


def check_device(tensor: torch.Tensor, group: ProcessGroup, what: str) -> None:
    """Raise if the backend cannot access the tensor.

    Raises:
        TensorError: NCCL with a tensor that is not on a GPU, or a meta tensor.
    """
    if tensor.is_cpu and group.info.backend is not Backend.NCCL:
        return
    if tensor.is_meta:
        raise TensorError(f"{what}: the tensor is on the meta device and has no data; create it with device=….")
    if group.backend is Backend.NCCL and not tensor.is_cuda:
        raise TensorError(
            f"{what}: NCCL needs CUDA tensors; got one on {tensor.device}. "
            "Use tensor.to(device), or a Gloo group for CPU tensors."
        )


def check_in_place(tensor: torch.Tensor, what: str) -> None:
    """Raise if a result cannot be written into the tensor.

    Raises:
        TensorError: several of its elements share memory, as after `expand`.
    """
    if tensor.is_contiguous():
        return
    if any(step == 0 and count > 1 for step, count in zip(tensor.stride(), tensor.shape, strict=True)):
        raise TensorError(
            f"{what}: elements of the tensor (shape {tuple(tensor.shape)}, stride {tensor.stride()}) share memory, "
            "and the result is written in place; use tensor.clone()."
        )


def prepare_move(tensor: torch.Tensor) -> WireTensor:
    """Prepare a tensor that is copied unchanged; dtypes that the backends do not support travel as bytes."""
    dense = tensor if tensor.is_contiguous() else tensor.contiguous()
    if dense.dtype in NATIVE:
        return WireTensor(tensor, dense)
    if not dense.numel():  # torch cannot view some strides of empty NumPy arrays as bytes
        return WireTensor(tensor, torch.empty(0, dtype=torch.uint8, device=dense.device))
    flat = dense.as_strided((dense.numel(),), (1,))  # one element may have any stride
    return WireTensor(tensor, flat.view(torch.uint8))


def prepare_reduce(tensor: torch.Tensor, op: ReduceOp, what: str) -> WireTensor:
    """Prepare a tensor that is reduced over ranks.

    Raises:
        TensorError: the operation is undefined for the dtype, or no backend supports it.
    """
    dtype = tensor.dtype
    if dtype in NATIVE and (dtype.is_floating_point or op is not ReduceOp.AVERAGE):
        return WireTensor(tensor, tensor if tensor.is_contiguous() else tensor.contiguous(), op)
    what = f"{what} ({op.value})"
    if op is ReduceOp.AVERAGE and not (dtype.is_floating_point or dtype.is_complex):
        raise TensorError(
            f"{what}: cannot average {dtype} tensors; use tensor.float(), or divide the sum by world_size."
        )
    if dtype is torch.bool:
        # As in NumPy: the sum of booleans is "any", the product is "all".
        any_of = op in (ReduceOp.SUM, ReduceOp.MAX)
        return WireTensor(tensor, tensor.to(torch.uint8), ReduceOp.MAX if any_of else ReduceOp.MIN)
    if dtype.is_complex:
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            raise TensorError(f"{what} of {dtype}: complex numbers have no order; reduce .abs(), .real or .imag.")
        dense = tensor.contiguous()
        return WireTensor(tensor, dense if op is ReduceOp.PRODUCT else torch.view_as_real(dense), op)
    if dtype in _WIDER:
        return WireTensor(tensor, tensor.to(_WIDER[dtype]).contiguous(), op)
    raise TensorError(f"{what}: no backend reduces {dtype}; use tensor.float() or tensor.bfloat16().")


@contextlib.contextmanager
def checking(on: bool = True) -> Iterator[None]:
    """Check inside this context, before each collective, that all ranks make the same call with matching tensors.

    Costs one small all_gather per call. Set `AXON_NB_CHECK=1` in the environment to turn it on everywhere.
    """
    token = _enabled.set(on)
    try:
        yield
    finally:
        _enabled.reset(token)


def check_agreement(
    group: ProcessGroup, name: str, tensor: torch.Tensor, *, op: ReduceOp | None = None, root: int = -1
) -> None:
    """Compare name, operation, root, dtype and shape with all ranks of the group, if checks are on.

    Raises:
        CollectiveMismatchError: a rank makes a different call.
        TensorMismatchError: a rank passes a different dtype or shape.
    """
    if not is_checking():
        return
    device = tensor.device if group.backend is Backend.NCCL else torch.device("cpu")
    local = torch.tensor(_signature(name, op, root, tensor), dtype=torch.int64, device=device)
    everyone = [torch.empty_like(local) for _ in group.ranks]
    dist.all_gather(everyone, local, group=group.torch_group)
    rows = [row.tolist() for row in everyone]
    for rank, row in enumerate(rows):
        if row[:3] != rows[0][:3]:
            raise CollectiveMismatchError(
                f"Collective mismatch: rank {group.ranks[0]} called {_call(rows[0])}, rank {group.ranks[rank]} called "
                f"{_call(row)} on the same group; all ranks must make the same calls in the same order."
            )
        if row != rows[0]:
            raise TensorMismatchError(
                f"{name}: rank {group.ranks[0]} passed {_tensor(rows[0])}, rank {group.ranks[rank]} passed "
                f"{_tensor(row)}; dtype and shape must match on all ranks."
            )


def _signature(name: str, op: ReduceOp | None, root: int, tensor: torch.Tensor) -> list[int]:
    shape = list(tensor.shape)[:_MAX_DIMS]
    call = [_NAMES.index(name), -1 if op is None else list(ReduceOp).index(op), root]
    return [*call, _DTYPES.index(tensor.dtype), tensor.ndim, *shape, *[-1] * (_MAX_DIMS - len(shape))]


def _call(row: list[int]) -> str:
    details = [list(ReduceOp)[row[1]].value] if row[1] >= 0 else []
    details += [f"from or to rank {row[2]}"] if row[2] >= 0 else []
    return _NAMES[row[0]] + (f" ({', '.join(details)})" if details else "")


def _tensor(row: list[int]) -> str:
    return f"{_DTYPES[row[3]]} of shape {tuple(row[5 : 5 + row[4]])}"
