"""Point-to-point communication: send and receive, with a small header if the receiver does not know the shape."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.collectives.arrays import Array, as_tensor, check_device, check_in_place, prepare_move
from axon_nb.comm.errors import InvalidRankError, TensorError, TensorMismatchError
from axon_nb.comm.group import GroupLike, ProcessGroup, rank_device, resolve
from axon_nb.comm.spans import now, record
from axon_nb.comm.types import Backend, Handle

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
