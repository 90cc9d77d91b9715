"""all_to_all: every rank sends some of its rows to every rank. Gradients flow back the way the rows came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.collectives.agreement import check_agreement
from axon_nb.comm.collectives.arrays import Array, as_input_type, as_tensor, check_device, prepare_move
from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.comm.spans import now, record


def all_to_all(
    tensor: Array,
    *,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> Any:
    """Send rows of `tensor` to each rank, and return the rows that all ranks sent to this one, in rank order.

    Differentiable: backward is an all_to_all with the sizes swapped, so every rank of the group must run it.

    Args:
        tensor: Shape (rows, …), ordered by receiver: first the rows for rank 0. All ranks pass one dtype, and rows of
            one shape. A torch tensor, NumPy or CuPy array.
        send_sizes: Rows for each rank of the group, 0 allowed; None: the same number for each.
        recv_sizes: Rows that each rank sends to this one. None: the same number if `send_sizes` is None, else ranks
            exchange them first, in one small all_to_all; ``all_to_all(torch.tensor(send_sizes))`` returns them.
        group: The participating ranks; None means all.

    Returns:
        A new array, shape (sum of `recv_sizes`, …).

    Raises:
        TensorError: the rows cannot be divided evenly, or sizes do not fit.
        NotInGroupError: this rank is not a member of the group.
    """
    pg = resolve(group)
    source = as_tensor(tensor)
    check_device(source, pg, "all_to_all")
    if not source.ndim:
        raise TensorError("all_to_all needs at least one dimension, which is split among ranks; got a 0-dim tensor.")
    rows, count = int(source.shape[0]), pg.size()
    if send_sizes is None and rows % count:
        raise TensorError(
            f"all_to_all: {rows} rows cannot be divided evenly among {count} ranks; pass send_sizes, one per rank."
        )
    sent = [rows // count] * count if send_sizes is None else _checked(send_sizes, "send_sizes", count)
    if sum(sent) != rows:
        raise TensorError(f"all_to_all: send_sizes must add up to the {rows} rows of the tensor; got {sent}.")
    check_agreement(pg, "all_to_all", source[:0])
    if recv_sizes is not None:
        received = _checked(recv_sizes, "recv_sizes", count)
    else:
        received = list(sent) if send_sizes is None else _exchange_sizes(sent, source, pg)
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        return _Exchange.apply(tensor, sent, received, pg)  # type: ignore[no-untyped-call]
    return as_input_type(_exchange(source, sent, received, pg), tensor)


def _checked(sizes: Sequence[int], name: str, count: int) -> list[int]:
    values = list(sizes)
    try:
        numbers = [value.__index__() for value in values]
    except AttributeError:
        numbers = []
    if len(numbers) != count or any(number < 0 for number in numbers):
        raise TensorError(f"all_to_all: {name} must be {count} numbers of rows, one per rank, from 0; got {values}.")
    return numbers


def _exchange_sizes(sent: list[int], source: torch.Tensor, pg: ProcessGroup) -> list[int]:
    numbers = torch.tensor(sent, dtype=torch.int64, device=source.device)
    return [int(size) for size in _exchange(numbers, [1] * len(sent), [1] * len(sent), pg).tolist()]


def _exchange(source: torch.Tensor, sent: list[int], received: list[int], pg: ProcessGroup) -> torch.Tensor:
    start, row = now(), source.shape[1:]
    result = source.new_empty((sum(received), *row))
    wire, target = prepare_move(source).buffer, prepare_move(result).buffer
    if wire.dtype is not source.dtype:  # it travels as bytes
        wire, target = _in_rows(wire, len(source)), _in_rows(target, len(result))
    dist.all_to_all_single(target, wire, received, sent, group=pg.torch_group)
    record(pg, "all_to_all", start, source.nbytes)
    return result


def _in_rows(buffer: torch.Tensor, rows: int) -> torch.Tensor:
    return buffer.view(rows, buffer.numel() // max(1, rows))


class _Exchange(torch.autograd.Function):
    """Autograd's view of all_to_all: its backward is the exchange in the other direction."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, sent: list[int], received: list[int], pg: ProcessGroup) -> Any:
        ctx.sent, ctx.received, ctx.pg = sent, received, pg
        return _exchange(tensor.detach(), sent, received, pg)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Exchange.apply(gradients[0], ctx.received, ctx.sent, ctx.pg), None, None, None  # type: ignore[no-untyped-call]
