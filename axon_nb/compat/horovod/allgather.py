"""allgather, grouped_allgather and sparse_allreduce_async."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from axon_nb.compat.horovod.allreduce import grouped_allreduce
from axon_nb.compat.horovod.runtime.handles import begin, checked, synchronize
from axon_nb.compat.horovod.runtime.operation import Operation, described
from axon_nb.compat.horovod.runtime.process_sets import ProcessSet, channel_of, global_process_set
from axon_nb.compat.horovod.runtime.reduce_ops import Op, chosen_op
from axon_nb.compat.horovod.runtime.transfers import gathered
from axon_nb.errors import UsageError

__all__ = ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async", "sparse_allreduce_async"]


def _operation(kind: str, tensor: torch.Tensor, name: str) -> Operation:
    value = checked(tensor, kind)
    if not value.ndim:
        raise UsageError(f"hvd.{kind} of a rank-zero tensor: rows are concatenated, so use tensor.reshape(1).")
    brings = described([value], any_rows=True)
    return Operation(kind, name, brings, gathered(value), rows=int(value.shape[0]))


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start concatenating the tensors of all ranks along dim 0. See `allgather`.

    Returns:
        A handle for `poll` and `synchronize`.
    """
    channel = channel_of(process_set)
    operation = _operation("allgather", tensor, channel.next_name("allgather") if name is None else name)
    return begin(channel, [operation], lambda results: results[0])


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start concatenating several tensors of all ranks along dim 0. See `allgather`.

    Returns:
        A handle for `poll` and `synchronize`, which returns a list.
    """
    kind, channel = "grouped_allgather", channel_of(process_set)
    base = channel.next_name(kind) if name is None else name
    operations = [_operation(kind, tensor, f"{base}.{number}") for number, tensor in enumerate(tensors)]
    if not operations:
        raise UsageError(f"hvd.{kind} needs at least one tensor.")
    return begin(channel, operations, list)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along dim 0, in rank order, on every rank.

    Args:
        tensor: Same dtype and shape on all ranks, except for the size of dim 0.
        name: Name of the collective; None for an automatic one.
        process_set: The participating ranks.

    Returns:
        A new tensor. Its gradient is the mean over ranks of the gradients of this rank's rows, as in Horovod.
    """
    result: torch.Tensor = _Allgather.apply("allgather", name, process_set, tensor)[0]  # type: ignore[no-untyped-call]
    return result


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Concatenate several tensors of all ranks along dim 0. See `allgather`."""
    return list(_Allgather.apply("grouped_allgather", name, process_set, *tensors))  # type: ignore[no-untyped-call]


class _Allgather(torch.autograd.Function):
    """Gathers rows of all ranks; backward averages gradients and returns those of this rank's rows."""

    @staticmethod
    def forward(
        ctx: Any, kind: str, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Gather."""
        ctx.process_set, ctx.rows = process_set, [tensor.shape[0] if tensor.ndim else 0 for tensor in tensors]
        if kind == "allgather":
            return (synchronize(allgather_async(tensors[0], name, process_set)),)
        return tuple(synchronize(grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Average, and return this rank's rows."""
        averages = grouped_allreduce(gradients, op=Op.AVERAGE, process_set=ctx.process_set)
        rows = synchronize(allgather_async(torch.tensor([ctx.rows]), process_set=ctx.process_set))
        starts = rows[: ctx.process_set.rank()].sum(0).tolist()
        own = [
            average.narrow(0, start, count) for average, start, count in zip(averages, starts, ctx.rows, strict=True)
        ]
        return None, None, None, *own


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int | None, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start reducing sparse tensors over ranks by gathering indices and values.

    Args:
        tensor: A sparse COO tensor of the same shape on all ranks.
        name: Name of the collective; None for an automatic one.
        op: Average or Sum.
        process_set: The participating ranks.

    Returns:
        A function that waits and returns the sum or average as a sparse tensor.

    Raises:
        UsageError: another operation.
    """
    chosen = chosen_op(op)
    if chosen not in (Op.AVERAGE, Op.SUM):
        raise UsageError(
            f"hvd.sparse_allreduce_async supports op=hvd.Average and hvd.Sum; got hvd.{chosen.name.title()}."
        )
    shape, given = tensor.shape, tensor.detach()
    names = (None, None) if name is None else (f"{name}.indices", f"{name}.values")
    indices_handle = allgather_async(given._indices().t().contiguous(), names[0], process_set)
    values_handle = allgather_async(given._values(), names[1], process_set)

    def wait() -> torch.Tensor:
        values, indices = synchronize(values_handle), synchronize(indices_handle)
        if chosen is Op.AVERAGE:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=False).coalesce()

    return wait
