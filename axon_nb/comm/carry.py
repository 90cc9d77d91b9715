"""Any tensor as something that every backend carries: dense in memory, and of a dtype that it knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.kinds import Backend, ReduceOp

__all__ = ["Cargo", "check_device", "check_in_place", "to_move", "to_reduce"]

# What both Gloo and NCCL reduce and move (torch 2.11 to 2.13).
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
"""Integers that no backend reduces, and one that holds them; what overflows wraps around as it would have."""


@dataclass(slots=True)  # not frozen, which takes five times as long to make
class Cargo:
    """A tensor on its way."""

    given: torch.Tensor
    buffer: torch.Tensor
    """What is communicated; the tensor itself where that is possible."""
    op: ReduceOp | None = None
    """The operation that gives the right result on the buffer."""

    @property
    def gathered_product(self) -> bool:
        """Whether no backend can reduce it, so that all values are gathered and multiplied here."""
        return self.op is ReduceOp.PRODUCT and self.buffer.is_complex()

    def unload(self, num_ranks: int = 1) -> torch.Tensor:
        """Put what came into the tensor that was given; averages are divided here."""
        given, buffer = self.given, self.buffer
        if self.op is ReduceOp.AVERAGE and num_ranks > 1:
            buffer.div_(num_ranks)
        if buffer.data_ptr() != given.data_ptr():  # else the same memory, seen in another dtype
            given.copy_(self.like(buffer))
        return given

    def like(self, buffer: torch.Tensor) -> torch.Tensor:
        """`buffer`, which holds whole rows of cargo like this one, in the dtype and row shape of the given tensor."""
        given = self.given
        if buffer.dtype is given.dtype:
            return buffer.view(given.shape) if buffer.numel() == given.numel() else buffer
        if given.is_complex() and buffer.is_floating_point():
            return torch.view_as_complex(buffer.view(-1, 2)).view(-1, *given.shape[1:] if given.ndim else ())
        if self.op is None:
            rows = buffer.reshape(-1).view(given.dtype)
            return rows.view(given.shape) if rows.numel() == given.numel() else rows.view(-1, *given.shape[1:])
        return buffer.to(given.dtype)


def check_device(tensor: torch.Tensor, group: ProcessGroup, what: str) -> None:
    """Say when the backend cannot reach the tensor.

    Raises:
        TensorError: NCCL and a tensor that is not on a GPU; a tensor without data.
    """
    if tensor.is_cpu and group.facts.backend is not Backend.NCCL:
        return
    if tensor.is_meta:
        raise TensorError(f"{what}: the tensor is on meta, without data; make it with device=….")
    if group.backend is Backend.NCCL and not tensor.is_cuda:
        raise TensorError(
            f"{what}: the tensor is on {tensor.device}, and NCCL takes CUDA tensors; "
            "use tensor.to(device), or a Gloo group for CPU tensors."
        )


def check_in_place(tensor: torch.Tensor, what: str) -> None:
    """Say when a result cannot be written into the tensor.

    Raises:
        TensorError: several of its elements are the same memory, as after `expand`.
    """
    if tensor.is_contiguous():
        return
    if any(step == 0 and count > 1 for step, count in zip(tensor.stride(), tensor.shape, strict=True)):
        raise TensorError(
            f"{what}: elements of the tensor, shape {tuple(tensor.shape)} and stride {tensor.stride()}, share memory, "
            "and the result comes in place; use tensor.clone()."
        )


def to_move(tensor: torch.Tensor) -> Cargo:
    """Cargo that arrives as it is: of a dtype that the backends do not know, its bytes."""
    dense = tensor if tensor.is_contiguous() else tensor.contiguous()
    if dense.dtype in NATIVE:
        return Cargo(tensor, dense)
    if not dense.numel():  # NumPy's strides of an empty array may be ones that torch views no bytes of
        return Cargo(tensor, torch.empty(0, dtype=torch.uint8, device=dense.device))
    return Cargo(tensor, dense.reshape(-1).view(torch.uint8))


def to_reduce(tensor: torch.Tensor, op: ReduceOp, what: str) -> Cargo:
    """Cargo that is combined with that of other ranks.

    Raises:
        TensorError: the operation makes no sense for the dtype, or nobody can carry it out.
    """
    dtype = tensor.dtype
    if dtype in NATIVE and (dtype.is_floating_point or op is not ReduceOp.AVERAGE):
        return Cargo(tensor, tensor if tensor.is_contiguous() else tensor.contiguous(), op)
    what = f"{what} ({op.value})"
    if op is ReduceOp.AVERAGE and not (dtype.is_floating_point or dtype.is_complex):
        raise TensorError(
            f"{what} of {dtype}: it cannot hold an average; use tensor.float(), or the sum divided by world_size."
        )
    if dtype is torch.bool:
        # As in NumPy: a sum of truths is "any", a product is "all".
        any_of = op in (ReduceOp.SUM, ReduceOp.MAX)
        return Cargo(tensor, tensor.to(torch.uint8), ReduceOp.MAX if any_of else ReduceOp.MIN)
    if dtype.is_complex:
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            raise TensorError(f"{what} of {dtype}: complex numbers have no order; reduce .abs(), .real or .imag.")
        dense = tensor.contiguous()
        return Cargo(tensor, dense if op is ReduceOp.PRODUCT else torch.view_as_real(dense), op)
    if dtype in _WIDER:
        return Cargo(tensor, tensor.to(_WIDER[dtype]).contiguous(), op)
    raise TensorError(f"{what} of {dtype}: no backend reduces it; use tensor.float() or tensor.bfloat16().")
