"""Collectives that combine values of all ranks: all_reduce and reduce_scatter."""

from __future__ import annotations

from typing import Any

import torch

from axon_nb.comm import direct, lane
from axon_nb.comm.arrays import Array, as_tensor, like_given
from axon_nb.comm.carry import Cargo, check_device, check_in_place, to_reduce
from axon_nb.comm.checks import check_agreement
from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.comm.handle import Handle
from axon_nb.comm.kinds import ReduceOp, as_op
from axon_nb.comm.spans import now, record

__all__ = [
    "all_reduce",
    "all_reduce_max",
    "all_reduce_mean",
    "all_reduce_min",
    "all_reduce_product",
    "all_reduce_sum",
    "reduce_scatter",
    "reduce_scatter_mean",
    "reduce_scatter_sum",
]


def all_reduce(tensor: Array, op: ReduceOp = ReduceOp.SUM, *, group: GroupLike = None, async_op: bool = False) -> Any:
    """Combine `tensor` over all ranks, in place; every rank gets the result.

    Args:
        tensor: Any shape, the same on all ranks; a torch tensor, a NumPy or CuPy array.
        op: How values are combined; torch's own operations and names such as ``"max"`` do as well.
        group: The ranks that take part; None: all.
        async_op: Return a `Handle` at once; its `wait` gives the tensor.

    Returns:
        `tensor` itself, changed.

    Raises:
        CommError: there is no such operation.
        TensorError: dtype, device or layout do not fit the operation.
        NotInGroup: this rank is no member of the group.
    """
    if not async_op and (done := lane.all_reduce(tensor, op, group)) is not None:
        return done
    pg = resolve(group)
    given = as_tensor(tensor)
    op = as_op(op)
    check_device(given, pg, "all_reduce")
    check_in_place(given, "all_reduce")
    cargo = to_reduce(given, op, "all_reduce")
    check_agreement(pg, "all_reduce", given, op=op)
    start, torch_group, size = now(), pg.torch_group, given.nbytes
    assert cargo.op is not None
    if op is ReduceOp.PRODUCT and cargo.gathered_product:
        work = _multiply_all(cargo, pg, async_op)
    else:
        work = direct.all_reduce(cargo.buffer, cargo.op.torch_op, group=torch_group, async_op=async_op)

    def finish() -> Any:
        cargo.unload(pg.size())
        record(pg, "all_reduce", start, size)
        return tensor

    return Handle(work, finish) if async_op else finish()


def _multiply_all(cargo: Cargo, pg: ProcessGroup, async_op: bool) -> Any:
    """No backend multiplies complex numbers: gather them, and multiply here in the order of ranks."""
    real = torch.view_as_real(cargo.buffer)
    everyone = real.new_empty((pg.size(), *real.shape))
    work = direct.all_gather(everyone.view(-1), real.reshape(-1), group=pg.torch_group, async_op=async_op)
    target = cargo.buffer

    def multiply() -> None:
        target.copy_(torch.view_as_complex(everyone).prod(dim=0))

    handle = Handle(work, multiply)
    return handle if async_op else handle.wait()


def all_reduce_sum(tensor: Array, *, group: GroupLike = None, async_op: bool = False) -> Any:
    """Sum over ranks, in place; truths are joined by "or". See `all_reduce`."""
    return all_reduce(tensor, ReduceOp.SUM, group=group, async_op=async_op)


def all_reduce_mean(tensor: Array, *, group: GroupLike = None, async_op: bool = False) -> Any:
    """Mean over ranks, in place; refused for integers. See `all_reduce`."""
    return all_reduce(tensor, ReduceOp.AVERAGE, group=group, async_op=async_op)


def all_reduce_min(tensor: Array, *, group: GroupLike = None, async_op: bool = False) -> Any:
    """Smallest value of all ranks, element by element, in place. See `all_reduce`."""
    return all_reduce(tensor, ReduceOp.MIN, group=group, async_op=async_op)


def all_reduce_max(tensor: Array, *, group: GroupLike = None, async_op: bool = False) -> Any:
    """Largest value of all ranks, element by element, in place. See `all_reduce`."""
    return all_reduce(tensor, ReduceOp.MAX, group=group, async_op=async_op)


def all_reduce_product(tensor: Array, *, group: GroupLike = None, async_op: bool = False) -> Any:
    """Product over ranks, in place; truths are joined by "and". See `all_reduce`."""
    return all_reduce(tensor, ReduceOp.PRODUCT, group=group, async_op=async_op)


def reduce_scatter(
    tensor: Array, op: ReduceOp = ReduceOp.SUM, *, group: GroupLike = None, async_op: bool = False
) -> Any:
    """Combine `tensor` over all ranks and give each rank its part of the result.

    Args:
        tensor: Shape (n * world size, …), the same on all ranks; it is not changed.
        op: How values are combined; torch's own operations and names such as ``"max"`` do as well.
        group: The ranks that take part; None: all.
        async_op: Return a `Handle` at once.

    Returns:
        A new array of shape (n, …): rows `rank * n` to `(rank + 1) * n` of the combined tensor.

    Raises:
        TensorError: dim 0 cannot be cut into equal parts; dtype or device do not fit.
        NotInGroup: this rank is no member of the group.
    """
    if not async_op and (done := lane.reduce_scatter(tensor, op, group)) is not None:
        return done
    pg = resolve(group)
    given = as_tensor(tensor)
    op = as_op(op)
    check_device(given, pg, "reduce_scatter")
    num_rows = _rows(given, pg.size())
    cargo = to_reduce(given, op, "reduce_scatter")
    check_agreement(pg, "reduce_scatter", given, op=op)
    start, torch_group, size = now(), pg.torch_group, given.nbytes
    assert cargo.op is not None
    own = pg.rank() * num_rows
    if op is ReduceOp.PRODUCT and cargo.gathered_product:
        whole = given.clone()
        work = _multiply_all(Cargo(given, whole, cargo.op), pg, async_op)
        part = whole[own : own + num_rows]
    else:
        part = cargo.buffer.new_empty((num_rows, *cargo.buffer.shape[1:]))
        work = direct.reduce_scatter(part, cargo.buffer, cargo.op.torch_op, group=torch_group, async_op=async_op)

    def finish() -> Any:
        result = part / pg.size() if cargo.op is ReduceOp.AVERAGE else part
        if given.is_complex() and not result.is_complex():
            result = torch.view_as_complex(result)
        record(pg, "reduce_scatter", start, size)
        return like_given(result.to(given.dtype), tensor)

    return Handle(work, finish) if async_op else finish()


def _rows(tensor: torch.Tensor, num_ranks: int) -> int:
    if tensor.ndim == 0 or tensor.shape[0] % num_ranks:
        shape = tuple(tensor.shape)
        raise TensorError(
            f"reduce_scatter of shape {shape} over {num_ranks} ranks: dim 0 must be a multiple of {num_ranks}; "
            "pad the tensor."
        )
    return int(tensor.shape[0]) // num_ranks


def reduce_scatter_sum(tensor: Array, *, group: GroupLike = None, async_op: bool = False) -> Any:
    """Each rank's part of the sum over ranks. See `reduce_scatter`."""
    return reduce_scatter(tensor, ReduceOp.SUM, group=group, async_op=async_op)


def reduce_scatter_mean(tensor: Array, *, group: GroupLike = None, async_op: bool = False) -> Any:
    """Each rank's part of the mean over ranks; refused for integers. See `reduce_scatter`."""
    return reduce_scatter(tensor, ReduceOp.AVERAGE, group=group, async_op=async_op)
