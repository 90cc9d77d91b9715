"""Collectives that move tensors unchanged: broadcast, gather, scatter, and barrier."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.collectives import direct, fast_path
from axon_nb.comm.collectives.agreement import check_agreement, is_checking
from axon_nb.comm.collectives.arrays import Array, as_input_type, as_tensor, check_device, check_in_place, prepare_move
from axon_nb.comm.collectives.point_to_point import pack, unpack
from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike, ProcessGroup, rank_device, resolve
from axon_nb.comm.spans import now, record
from axon_nb.comm.types import Backend, Handle


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
    if not async_op and (done := fast_path.broadcast(tensor, src, group)) is not None:
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
    if not (uneven or async_op) and dim == 0 and (done := fast_path.all_gather(tensor, group)) is not None:
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
    device = torch.device("cuda", torch.cuda.current_device()) if pg.backend is Backend.NCCL else torch.device("cpu")
    header = pack(blocks[0] if blocks else None).to(device)
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
