"""Communication that moves tensors unchanged: broadcast, gather, scatter, all_to_all, send and receive; and barrier.

Gradients of all_to_all flow back the way the rows came. A message has a small header if the receiver does not know the
shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.collectives import direct
from axon_nb.comm.collectives.arguments import (
    Array,
    as_input_type,
    as_tensor,
    check_agreement,
    check_device,
    check_in_place,
    is_checking,
    prepare_move,
)
from axon_nb.comm.errors import InvalidRankError, TensorError, TensorMismatchError
from axon_nb.comm.group import Backend, GroupLike, Handle, ProcessGroup, rank_device, resolve
from axon_nb.comm.spans import now, record

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


def broadcast(tensor: Array, *, src: int = 0, group: GroupLike = None, async_op: bool = False) -> Any:
    """Copy the tensor of rank `src` to every rank, in place.

    Args:
        tensor: Any shape and dtype, the same on all ranks; a torch tensor, NumPy or CuPy array.
        src: Rank within the group.
        group: The participating ranks; None means all.
        async_op: Return a `Handle` at once; its `wait` returns the tensor.

    Returns:
        `tensor` itself, overwritten on all ranks but `src`.

    Raises:
        InvalidRankError: the group has no rank `src`.
        NotInGroupError: this rank is not a member of the group.
    """
    if not async_op and (done := direct.fast_broadcast(tensor, src, group)) is not None:
        return done
    pg = resolve(group)
    source = as_tensor(tensor)
    check_device(source, pg, "broadcast")
    check_in_place(source, "broadcast")
    root = pg.check_rank(src, "src")
    check_agreement(pg, "broadcast", source, root=src)
    wire = prepare_move(source)
    start, size = now(), source.nbytes
    work = direct.broadcast(wire.buffer, root, group=pg.torch_group, async_op=async_op)

    def finish() -> Any:
        wire.copy_back()
        record(pg, "broadcast", start, size)
        return tensor

    return Handle(work, finish) if async_op else finish()


def broadcast_from(tensor: Array, src: int, *, group: GroupLike = None, async_op: bool = False) -> Any:
    """`broadcast` with `src` as a positional argument."""
    return broadcast(tensor, src=src, group=group, async_op=async_op)


def all_gather(
    tensor: Array, *, dim: int = 0, uneven: bool = False, group: GroupLike = None, async_op: bool = False
) -> Any:
    """Join the tensors of all ranks along a dimension, in rank order; every rank gets the result.

    Args:
        tensor: The same dtype on all ranks, and the same shape; with `uneven` the size in `dim` may differ. A 0-dim
            tensor counts as shape (1,).
        dim: Dimension along which to join.
        uneven: Exchange the sizes first (one small round trip).
        group: The participating ranks; None means all.
        async_op: Return a `Handle` at once (not with `uneven`).

    Returns:
        A new array.

    Raises:
        TensorError: `dim` is out of range, or `uneven` is combined with `async_op`.
        NotInGroupError: this rank is not a member of the group.
    """
    if not (uneven or async_op) and dim == 0 and (done := direct.fast_all_gather(tensor, group)) is not None:
        return done
    pg = resolve(group)
    source = as_tensor(tensor)
    check_device(source, pg, "all_gather")
    block = source.reshape(1) if source.ndim == 0 else source
    if not hasattr(dim, "__index__") or not -block.ndim <= dim < block.ndim:
        raise TensorError(f"all_gather: dim must be {-block.ndim} to {block.ndim - 1}; got {dim!r}.")
    if uneven and async_op:
        raise TensorError("all_gather: uneven=True cannot be combined with async_op, as it first waits for the sizes.")
    rows = block.movedim(dim, 0) if dim else block
    sizes = _gather_sizes(rows, pg) if uneven else [int(rows.shape[0])] * pg.size()
    if not uneven:
        check_agreement(pg, "all_gather", source)
    start, size, longest = now(), source.nbytes, max(sizes)
    wire = prepare_move(_padded(rows, longest))
    if wire.buffer is source and not uneven:  # the received tensor is the result
        whole = source.new_empty((longest * pg.size(), *source.shape[1:]))
        work = direct.all_gather(whole, source, group=pg.torch_group, async_op=async_op)
    else:
        whole = None
        everyone = wire.buffer.new_empty(pg.size() * wire.buffer.numel())
        work = direct.all_gather(everyone, wire.buffer.reshape(-1), group=pg.torch_group, async_op=async_op)

    def finish() -> Any:
        if whole is not None:
            joined = whole
        else:
            parts = everyone.view(source.dtype).view(pg.size(), longest, *rows.shape[1:])
            joined = torch.cat([parts[rank, :n] for rank, n in enumerate(sizes)]) if uneven else parts.flatten(0, 1)
            joined = joined.movedim(0, dim)
        record(pg, "all_gather", start, size)
        return as_input_type(joined, tensor)

    return Handle(work, finish) if async_op else finish()


def _gather_sizes(rows: torch.Tensor, pg: ProcessGroup) -> list[int]:
    local = torch.tensor([rows.shape[0]], dtype=torch.int64, device=_header_device(rows, pg))
    everyone = local.new_empty(pg.size())
    direct.all_gather(everyone, local, group=pg.torch_group, async_op=False)
    return [int(size) for size in everyone.tolist()]


def _header_device(tensor: torch.Tensor, pg: ProcessGroup) -> torch.device:
    return tensor.device if pg.backend is Backend.NCCL else torch.device("cpu")


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    if rows.shape[0] == length:
        return rows
    return torch.cat([rows, rows.new_zeros((length - rows.shape[0], *rows.shape[1:]))])


def gather_tensor(tensor: Array, *, dst: int = 0, group: GroupLike = None, async_op: bool = False) -> Any:
    """Join the tensors of all ranks along dim 0 on rank `dst`.

    Args:
        tensor: The same dtype and shape on all ranks; a 0-dim tensor counts as shape (1,).
        dst: Rank within the group.
        group: The participating ranks; None means all.
        async_op: Return a `Handle` at once.

    Returns:
        A new array on `dst`, None on the other ranks.

    Raises:
        InvalidRankError: the group has no rank `dst`.
        NotInGroupError: this rank is not a member of the group.
    """
    pg = resolve(group)
    source = as_tensor(tensor)
    check_device(source, pg, "gather_tensor")
    root = pg.ranks[pg.check_rank(dst, "dst")]
    check_agreement(pg, "gather_tensor", source, root=dst)
    block = source.reshape(1) if source.ndim == 0 else source
    wire = prepare_move(block)
    start, size = now(), source.nbytes
    is_root = pg.rank() == dst
    parts = [torch.empty_like(wire.buffer) for _ in pg.ranks] if is_root else None
    work = dist.gather(wire.buffer, parts, dst=root, group=pg.torch_group, async_op=async_op)

    def finish() -> Any:
        record(pg, "gather", start, size)
        if parts is None:
            return None
        joined = torch.cat([part.view(source.dtype).view(block.shape) for part in parts])
        return as_input_type(joined, tensor)

    return Handle(work, finish) if async_op else finish()


def scatter_tensor(
    tensor: Array | None, *, src: int = 0, out: Array | None = None, group: GroupLike = None, async_op: bool = False
) -> Any:
    """Split the tensor of rank `src` along dim 0 and send one part to each rank.

    Args:
        tensor: The tensor of `src`, shape (n * world_size, …). Ignored on other ranks, where it may be None.
        src: Rank within the group.
        out: Dense tensor of shape (n, …) that receives this rank's part. None: a new tensor; a small header is sent
            first, so pass `out` either on all ranks or on none.
        group: The participating ranks; None means all.
        async_op: Return a `Handle` at once (requires `out`).

    Returns:
        This rank's part.

    Raises:
        TensorError: dim 0 is not divisible by the group size, or `src` passed no tensor.
        InvalidRankError: the group has no rank `src`.
        NotInGroupError: this rank is not a member of the group.
    """
    pg = resolve(group)
    root = pg.ranks[pg.check_rank(src, "src")]
    is_root = pg.rank() == src
    blocks = _split_for_ranks(tensor, pg) if is_root else None
    if out is None and async_op:
        raise TensorError("scatter_tensor: async_op needs `out`, as the shape is not known in advance.")
    target = _target_from_header(blocks, root, pg) if out is None else as_tensor(out, "out")
    check_device(target, pg, "scatter_tensor")
    check_in_place(target, "scatter_tensor")
    wire = prepare_move(target)
    start, size = now(), target.nbytes
    parts = None if blocks is None else [prepare_move(block).buffer.view(wire.buffer.shape) for block in blocks]
    work = dist.scatter(wire.buffer, parts, src=root, group=pg.torch_group, async_op=async_op)

    def finish() -> Any:
        wire.copy_back()
        record(pg, "scatter", start, size)
        return out if out is not None else as_input_type(target, tensor) if tensor is not None else target

    return Handle(work, finish) if async_op else finish()


def _split_for_ranks(tensor: Array | None, pg: ProcessGroup) -> list[torch.Tensor]:
    if tensor is None:
        raise TensorError("scatter_tensor: tensor is None on rank `src`; pass the tensor to split.")
    whole = as_tensor(tensor)
    if whole.ndim == 0 or whole.shape[0] % pg.size():
        raise TensorError(
            f"scatter_tensor: dim 0 must be divisible by the group size ({pg.size()}); got shape "
            f"{tuple(whole.shape)}. Pad the tensor."
        )
    return list(whole.contiguous().chunk(pg.size())) if whole.shape[0] else [whole] * pg.size()


def _target_from_header(blocks: list[torch.Tensor] | None, root: int, pg: ProcessGroup) -> torch.Tensor:
    """Return an empty tensor with the shape and dtype of the root's parts."""
    header = pack(blocks[0] if blocks else None).to(_device(pg))
    dist.broadcast(header, root, group=pg.torch_group)
    return unpack(header, rank_device(pg) if blocks is None else blocks[0].device)


def barrier(*, group: GroupLike = None, async_op: bool = False) -> Any:
    """Wait until every rank of the group has called `barrier`.

    Raises:
        NotInGroupError: this rank is not a member of the group.
    """
    pg = resolve(group)
    if is_checking():
        check_agreement(pg, "barrier", torch.empty(0, device=rank_device(pg)))
    start = now()
    work = dist.barrier(group=pg.torch_group, async_op=async_op)

    def finish() -> None:
        record(pg, "barrier", start, 0)

    return Handle(work, finish) if async_op else finish()


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


def pack(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return the header of `tensor`; for None an empty one, to receive into.

    Raises:
        TensorError: the dtype is not supported, or the tensor has too many dimensions.
    """
    header = torch.zeros(SIZE, dtype=torch.int64, device="cpu")
    if tensor is None:
        return header
    if tensor.dtype not in _DTYPES:
        raise TensorError(f"a header cannot describe {tensor.dtype}; pass `out=` on the receiving ranks.")
    if tensor.ndim > _MAX_DIMS:
        raise TensorError(f"a header holds at most {_MAX_DIMS} dimensions; got {tensor.ndim}. Flatten the tensor.")
    header[: 3 + tensor.ndim] = torch.tensor(
        [_MARK, _DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape], device="cpu"
    )
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


def send(
    tensor: Array, dst: int, *, tag: int = 0, header: bool = True, group: GroupLike = None, async_op: bool = False
) -> Any:
    """Send `tensor` to rank `dst`.

    Args:
        tensor: Any shape and dtype.
        dst: Rank within the group.
        tag: Must equal the receiver's tag.
        header: Send shape and dtype first, so that the receiver need not know them. Both sides must agree.
        group: The group in which `dst` counts; None means all ranks.
        async_op: Return a `Handle` at once; do not change the tensor before its `wait`.

    Raises:
        InvalidRankError: the group has no rank `dst`, or it is this rank.
        NotInGroupError: this rank is not a member of the group.
    """
    pg = resolve(group)
    source = as_tensor(tensor)
    check_device(source, pg, "send")
    peer = _peer(pg, dst, "dst")
    wire = prepare_move(source)
    start, size = now(), source.nbytes
    works: list[Any] = [dist.isend(pack(source).to(_device(pg)), peer, group=pg.torch_group, tag=tag)] if header else []
    works.append(dist.isend(wire.buffer, peer, group=pg.torch_group, tag=tag))

    def finish() -> None:
        works[0].wait()
        record(pg, "send", start, size, kind="p2p")

    handle = Handle(works[-1], finish)
    return handle if async_op else handle.wait()


def recv(
    src: int,
    *,
    out: Array | None = None,
    tag: int = 0,
    header: bool = True,
    group: GroupLike = None,
) -> Any:
    """Receive a tensor from rank `src`.

    Args:
        src: Rank within the group.
        out: The tensor to receive into; None: a new one, as described by the sender's header.
        tag: Must equal the sender's tag.
        header: Whether the sender sends a header with shape and dtype; without one, `out` is required.
        group: The group in which `src` counts; None means all ranks.

    Returns:
        `out`, or the new tensor.

    Raises:
        TensorMismatchError: the sender's tensor does not fit into `out`; it was received and dropped.
        InvalidRankError: the group has no rank `src`, or it is this rank.
        NotInGroupError: this rank is not a member of the group.
    """
    pg = resolve(group)
    peer = _peer(pg, src, "src")
    start = now()
    target = None if out is None else as_tensor(out, "out")
    if target is not None:
        check_device(target, pg, "recv")
        check_in_place(target, "recv")
    if header:
        header_buffer = pack(None).to(_device(pg))
        _receive(header_buffer, peer, pg, tag)
        described = unpack(header_buffer, rank_device(pg))
        if target is None:
            target = described
        elif (target.shape, target.dtype) != (described.shape, described.dtype):
            _receive(prepare_move(described).buffer, peer, pg, tag)
            raise TensorMismatchError(
                f"recv: rank {src} sent {described.dtype} of shape {tuple(described.shape)}, but `out` is "
                f"{target.dtype} of shape {tuple(target.shape)}. Leave out `out`, or make it fit."
            )
    elif target is None:
        raise TensorMismatchError("recv: header=False needs `out=`, a tensor of the shape that the sender sends.")
    wire = prepare_move(target)
    _receive(wire.buffer, peer, pg, tag)
    wire.copy_back()
    record(pg, "recv", start, target.nbytes, kind="p2p")
    return out if out is not None else target


def _receive(buffer: torch.Tensor, peer: int, pg: ProcessGroup, tag: int) -> None:
    dist.recv(buffer, peer, group=pg.torch_group, tag=tag)


def _device(pg: ProcessGroup) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if pg.backend is Backend.NCCL else torch.device("cpu")


def _peer(pg: ProcessGroup, rank: int, name: str) -> int:
    """Return the global rank of a member other than this one."""
    if pg.check_rank(rank, name) == pg.rank():
        raise InvalidRankError(f"{name}={rank} is this rank; a rank cannot send to itself.")
    return pg.ranks[rank]
