"""Collectives that combine values over ranks: all_reduce and reduce_scatter."""

from __future__ import annotations

from typing import Any

import torch

from axon_nb.comm.collectives import arguments, direct
from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike, Handle, ProcessGroup, ReduceOp, as_op, resolve
from axon_nb.comm.spans import now, record


def all_reduce(
    tensor: arguments.Array, op: ReduceOp = ReduceOp.SUM, *, group: GroupLike = None, async_op: bool = False
) -> Any:
    """Combine `tensor` over all ranks, in place; every rank gets the result.

    Args:
        tensor: Any shape, the same on all ranks; a torch tensor, NumPy or CuPy array.
        op: How values are combined; torch's own operations and names such as ``"max"`` are accepted as well.
        group: The participating ranks; None means all.
        async_op: Return a `Handle` at once; its `wait` returns the tensor.

    Returns:
        `tensor` itself, changed.

    Raises:
        CommError: the operation is unknown.
        TensorError: the operation does not support the dtype, device or layout.
        NotInGroupError: this rank is not a member of the group.
    """
    if not async_op and (done := direct.fast_all_reduce(tensor, op, group)) is not None:
        return done
    pg = resolve(group)
    source = arguments.as_tensor(tensor)
    op = as_op(op)
    arguments.check_device(source, pg, "all_reduce")
    arguments.check_in_place(source, "all_reduce")
    wire = arguments.prepare_reduce(source, op, "all_reduce")
    arguments.check_agreement(pg, "all_reduce", source, op=op)
    start, torch_group, size = now(), pg.torch_group, source.nbytes
    assert wire.op is not None
    if op is ReduceOp.PRODUCT and wire.needs_gathered_product:
        work = _multiply_all(wire, pg, async_op)
    else:
        work = direct.all_reduce(wire.buffer, wire.op.torch_op, group=torch_group, async_op=async_op)

    def finish() -> Any:
        wire.copy_back(pg.size())
        record(pg, "all_reduce", start, size)
        return tensor

    return Handle(work, finish) if async_op else finish()


def _multiply_all(wire: arguments.WireTensor, pg: ProcessGroup, async_op: bool) -> Any:
    """No backend multiplies complex numbers: gather them, and multiply locally in rank order."""
    real = torch.view_as_real(wire.buffer)
    everyone = real.new_empty((pg.size(), *real.shape))
    work = direct.all_gather(everyone.view(-1), real.reshape(-1), group=pg.torch_group, async_op=async_op)
    target = wire.buffer

    def multiply() -> None:
        target.copy_(torch.view_as_complex(everyone).prod(dim=0))

    handle = Handle(work, multiply)
    return handle if async_op else handle.wait()


def all_reduce_sum(tensor: arguments.Array, *, group: GroupLike = None, async_op: bool = False) -> Any:
    """Sum over ranks, in place; booleans are combined with "or". See `all_reduce`."""
    return all_reduce(tensor, ReduceOp.SUM, group=group, async_op=async_op)


def all_reduce_mean(tensor: arguments.Array, *, group: GroupLike = None, async_op: bool = False) -> Any:
    """Average over ranks, in place; not defined for integers. See `all_reduce`."""
    return all_reduce(tensor, ReduceOp.AVERAGE, group=group, async_op=async_op)


def all_reduce_min(tensor: arguments.Array, *, group: GroupLike = None, async_op: bool = False) -> Any:
    """Elementwise minimum over ranks, in place. See `all_reduce`."""
    return all_reduce(tensor, ReduceOp.MIN, group=group, async_op=async_op)


def all_reduce_max(tensor: arguments.Array, *, group: GroupLike = None, async_op: bool = False) -> Any:
    """Elementwise maximum over ranks, in place. See `all_reduce`."""
    return all_reduce(tensor, ReduceOp.MAX, group=group, async_op=async_op)


def all_reduce_product(tensor: arguments.Array, *, group: GroupLike = None, async_op: bool = False) -> Any:
    """Multiply over ranks, in place; booleans are combined with "and". See `all_reduce`."""
    return all_reduce(tensor, ReduceOp.PRODUCT, group=group, async_op=async_op)


def reduce_scatter(
    tensor: arguments.Array, op: ReduceOp = ReduceOp.SUM, *, group: GroupLike = None, async_op: bool = False
) -> Any:
    """Combine `tensor` over all ranks and give each rank one part of the result.

    Args:
        tensor: Shape (n * world_size, …), the same on all ranks; it is not changed.
        op: How values are combined; torch's own operations and names such as ``"max"`` are accepted as well.
        group: The participating ranks; None means all.
        async_op: Return a `Handle` at once.

    Returns:
        A new array of shape (n, …): rows `rank * n` to `(rank + 1) * n` of the combined tensor.

    Raises:
        TensorError: dim 0 is not divisible by the group size, or the dtype or device is not supported.
        NotInGroupError: this rank is not a member of the group.
    """
    if not async_op and (done := direct.fast_reduce_scatter(tensor, op, group)) is not None:
        return done
    pg = resolve(group)
    source = arguments.as_tensor(tensor)
    op = as_op(op)
    arguments.check_device(source, pg, "reduce_scatter")
    num_rows = _rows(source, pg.size())
    wire = arguments.prepare_reduce(source, op, "reduce_scatter")
    arguments.check_agreement(pg, "reduce_scatter", source, op=op)
    start, torch_group, size = now(), pg.torch_group, source.nbytes
    assert wire.op is not None
    first_row = pg.rank() * num_rows
    if op is ReduceOp.PRODUCT and wire.needs_gathered_product:
        whole = source.clone()
        work = _multiply_all(arguments.WireTensor(source, whole, wire.op), pg, async_op)
        part = whole[first_row : first_row + num_rows]
    else:
        part = wire.buffer.new_empty((num_rows, *wire.buffer.shape[1:]))
        work = direct.reduce_scatter(part, wire.buffer, wire.op.torch_op, group=torch_group, async_op=async_op)

    def finish() -> Any:
        result = part / pg.size() if wire.op is ReduceOp.AVERAGE else part
        if source.is_complex() and not result.is_complex():
            result = torch.view_as_complex(result)
        record(pg, "reduce_scatter", start, size)
        return arguments.as_input_type(result.to(source.dtype), tensor)

    return Handle(work, finish) if async_op else finish()


def _rows(tensor: torch.Tensor, num_ranks: int) -> int:
    if tensor.ndim == 0 or tensor.shape[0] % num_ranks:
        shape = tuple(tensor.shape)
        raise TensorError(
            f"reduce_scatter: dim 0 must be divisible by the group size ({num_ranks}); got shape {shape}. "
            "Pad the tensor."
        )
    return int(tensor.shape[0]) // num_ranks


def reduce_scatter_sum(tensor: arguments.Array, *, group: GroupLike = None, async_op: bool = False) -> Any:
    """Give each rank its part of the sum over ranks. See `reduce_scatter`."""
    return reduce_scatter(tensor, ReduceOp.SUM, group=group, async_op=async_op)


def reduce_scatter_mean(tensor: arguments.Array, *, group: GroupLike = None, async_op: bool = False) -> Any:
    """Give each rank its part of the mean over ranks; not defined for integers. See `reduce_scatter`."""
    return reduce_scatter(tensor, ReduceOp.AVERAGE, group=group, async_op=async_op)
