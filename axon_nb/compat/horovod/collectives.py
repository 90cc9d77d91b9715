"""Reductions, `allgather`, `alltoall` and `broadcast`, with the gradients that Horovod defines."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from axon_nb import comm
from axon_nb.compat.horovod.agreement import Call, agree, describe, sum_buffers
from axon_nb.compat.horovod.compression import Compression, Compressor
from axon_nb.compat.horovod.errors import NotOfferedError
from axon_nb.compat.horovod.world import current
from axon_nb.errors import UsageError


class Op(enum.IntEnum):
    """Reduce operations; the numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1


Average, Sum = Op


def as_op(op: int | None, average: bool | None = None) -> Op:
    """Return a call's operation; Average if neither is set.

    Args:
        op: Average or Sum.
        average: The older parameter: True is Average, False is Sum.

    Raises:
        UsageError: Both were passed, or `op` is neither.
    """
    if op is not None and average is not None:
        raise UsageError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        warnings.warn("Parameter `average` has been replaced with `op`.", DeprecationWarning, stacklevel=3)
        return Op.AVERAGE if average else Op.SUM
    if op not in (None, *Op):
        raise UsageError(f"op must be hvd.Average or hvd.Sum; got {op!r}.")
    return Op(op or 0)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
) -> torch.Tensor:
    """Reduce a tensor over all ranks; every rank gets the result. Differentiable.

    Args:
        tensor: Tensor of the same dtype and shape on all ranks; it is not changed.
        average: The older form of `op`.
        name: Name for messages; it must be the same on all ranks.
        compression: Compression of the tensor for communication.
        op: Average (default) or Sum. The average of integers is truncated.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
        HorovodInternalError: Ranks pass different tensors, operations or names.
    """
    reduce_op = as_op(op, average)
    packed, context = compression.compress(_checked(tensor, "allreduce"))
    result = _Allreduce.apply(packed, name, reduce_op)  # type: ignore[no-untyped-call]
    unpacked: torch.Tensor = compression.decompress(result, context)
    return unpacked


class _Allreduce(torch.autograd.Function):
    """A reduction whose gradient is reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, op: Op) -> torch.Tensor:
        """Reduce a copy."""
        ctx.op = op
        if op is Op.AVERAGE and tensor.dtype is torch.bool:
            raise UsageError("hvd.allreduce of torch.bool: cannot average booleans; use op=hvd.Sum or tensor.float().")
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        reduce_buffers("allreduce", name, (f"{op.name.title()} of {describe(tensor)}",), [result.view(-1)], op)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Reduce the gradient."""
        return _Allreduce.apply(gradients[0], None, ctx.op), None, None  # type: ignore[no-untyped-call]


def reduce_buffers(
    kind: str, name: str | None, items: tuple[str, ...], buffers: Sequence[torch.Tensor], op: Op
) -> None:
    """Reduce contiguous 1-D tensors over all ranks, in place; `items` says what ranks must pass alike."""
    sizes = tuple((buffer.numel(), buffer.dtype, buffer.device.type) for buffer in buffers)
    agree(Call(kind, name, items, sizes))
    sum_buffers(buffers)
    for buffer in buffers if op is Op.AVERAGE else ():
        mode = None if buffer.is_floating_point() or buffer.is_complex() else "trunc"
        buffer.copy_(torch.div(buffer, len(current().hosts), rounding_mode=mode))


def _checked(tensor: Any, kind: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"hvd.{kind} needs a torch.Tensor, such as torch.tensor(value); got {type(tensor).__name__}.")
    if tensor.layout is not torch.strided:
        raise UsageError(f"hvd.{kind} does not support layout {tensor.layout}: pass tensor.to_dense().")
    if kind != "allreduce" and tensor.requires_grad and torch.is_grad_enabled():
        raise NotOfferedError(f"hvd.{kind} has no gradient here: pass tensor.detach(), or use torch.distributed.nn.")
    if kind in ("allgather", "alltoall") and not tensor.ndim:
        raise UsageError(f"hvd.{kind} needs at least one dimension: use tensor.reshape(1).")
    return tensor.contiguous()


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks along dim 0, in rank order, on every rank. Not differentiable.

    Args:
        tensor: Tensor of the same dtype and shape on all ranks, except for the size of dim 0.
        name: Name for messages; it must be the same on all ranks.

    Raises:
        NotOfferedError: The tensor requires a gradient.
        HorovodInternalError: Ranks pass different dtypes, shapes or names.
    """
    rows = _checked(tensor, "allgather")
    agree(Call("allgather", name, (describe(rows, any_rows=True),)))
    return comm.all_gather(rows, uneven=True)  # type: ignore[no-any-return]


def alltoall(tensor: torch.Tensor, splits: Any = None, name: str | None = None) -> Any:
    """Send a part of a tensor's rows to each rank. Not differentiable.

    Args:
        tensor: Tensor of the same dtype and shape on all ranks, except for the size of dim 0.
        splits: Number of rows for each rank, a list or a tensor of integers; None divides the rows equally.
        name: Name for messages; it must be the same on all ranks.

    Returns:
        The received rows, in rank order; with `splits` also how many came from each rank.

    Raises:
        NotOfferedError: The tensor requires a gradient.
        UsageError: The rows cannot be divided, or the splits do not add up.
        HorovodInternalError: Ranks pass different dtypes, shapes or names.
    """
    rows = _checked(tensor, "alltoall")
    state = current()
    size, count = len(state.hosts), rows.shape[0]
    if splits is None and count % size:
        raise UsageError(f"hvd.alltoall of {count} rows without splits: rows must be divisible by {size} ranks.")
    counts = [count // size] * size if splits is None else torch.as_tensor(splits).tolist()
    if len(counts) != size or sum(counts) != count or any(type(each) is not int or each < 0 for each in counts):
        raise UsageError(
            f"hvd.alltoall: splits must be {size} integers, one for each rank, of sum {count}; got {counts}."
        )
    agree(Call("alltoall", name, (describe(rows, any_rows=True),)))
    received = comm.all_gather(torch.tensor([counts], device=rows.device))[:, state.rank].cpu()
    result = comm.all_to_all(rows, send_sizes=counts, recv_sizes=received.tolist())
    return result if splits is None else (result, received)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return rank `root_rank`'s tensor on every rank. Not differentiable.

    Args:
        tensor: Tensor of the same dtype and shape on all ranks; it is not changed.
        root_rank: Rank of the source.
        name: Name for messages; it must be the same on all ranks.

    Raises:
        NotOfferedError: The tensor requires a gradient.
        HorovodInternalError: Ranks pass different tensors, roots or names.
    """
    root = check_root(root_rank)
    result = _checked(tensor, "broadcast").clone()
    agree(Call("broadcast", name, (f"{describe(result)} with root rank {root}",)))
    return comm.broadcast(result, src=root)  # type: ignore[no-any-return]


def check_root(root_rank: int) -> int:
    """Return the rank.

    Raises:
        UsageError: There is no such rank.
    """
    size = len(current().hosts)
    if not 0 <= root_rank < size:
        raise UsageError(f"root_rank={root_rank}: must be from 0 to {size - 1}.")
    return root_rank
