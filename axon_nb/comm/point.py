"""Point-to-point communication: send and receive."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.arrays import Array, as_tensor
from axon_nb.comm.carry import check_device, check_in_place, prepare_move
from axon_nb.comm.errors import InvalidRankError, TensorMismatchError
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.comm.handle import Handle
from axon_nb.comm.headers import pack, unpack
from axon_nb.comm.kinds import Backend
from axon_nb.comm.spans import now, record

__all__ = ["recv", "send"]


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
    given = as_tensor(tensor)
    check_device(given, pg, "send")
    peer = _peer(pg, dst, "dst")
    wire = prepare_move(given)
    start, size = now(), given.nbytes
    works: list[Any] = [dist.isend(pack(given).to(_device(pg)), peer, group=pg.torch_group, tag=tag)] if header else []
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
        described = unpack(header_buffer, _device(pg))
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
