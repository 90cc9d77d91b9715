"""Sending to one rank and receiving from one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.arrays import Array, as_tensor
from axon_nb.comm.carry import check_device, check_in_place, to_move
from axon_nb.comm.errors import InvalidRank, TensorMismatch
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
        tag: Matches the receive of the same tag.
        header: Send shape and dtype first, so that the receiver need not know them; both sides say the same.
        group: Where `dst` counts; None: all ranks.
        async_op: Return a `Handle` at once; the tensor must not be changed before its `wait`.

    Raises:
        InvalidRank: the group has no rank `dst`, or it is this one.
        NotInGroup: this rank is no member of the group.
    """
    pg = resolve(group)
    given = as_tensor(tensor)
    check_device(given, pg, "send")
    peer = _peer(pg, dst, "dst")
    cargo = to_move(given)
    start, size = now(), given.nbytes
    works: list[Any] = [dist.isend(pack(given).to(_device(pg)), peer, group=pg.torch_group, tag=tag)] if header else []
    works.append(dist.isend(cargo.buffer, peer, group=pg.torch_group, tag=tag))

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
        out: Where it goes; None: a new tensor, as announced by the sender.
        tag: Matches the send of the same tag.
        header: Whether the sender announces shape and dtype; without it `out` is needed.
        group: Where `src` counts; None: all ranks.

    Returns:
        `out`, or the new tensor.

    Raises:
        TensorMismatch: what was announced does not fit into `out`; it was received and dropped.
        InvalidRank: the group has no rank `src`, or it is this one.
        NotInGroup: this rank is no member of the group.
    """
    pg = resolve(group)
    peer = _peer(pg, src, "src")
    start = now()
    target = None if out is None else as_tensor(out, "out")
    if target is not None:
        check_device(target, pg, "recv")
        check_in_place(target, "recv")
    if header:
        announced = pack(None).to(_device(pg))
        _receive(announced, peer, pg, tag)
        fresh = unpack(announced, _device(pg))
        if target is None:
            target = fresh
        elif (target.shape, target.dtype) != (fresh.shape, fresh.dtype):
            _receive(to_move(fresh).buffer, peer, pg, tag)
            raise TensorMismatch(
                f"recv from rank {src}: it sends {fresh.dtype} of shape {tuple(fresh.shape)}, `out` is {target.dtype} "
                f"of shape {tuple(target.shape)}; leave `out` away, or make it fit."
            )
    elif target is None:
        raise TensorMismatch(f"recv from rank {src} without a header: give `out=` a tensor of the shape that comes.")
    cargo = to_move(target)
    _receive(cargo.buffer, peer, pg, tag)
    cargo.unload()
    record(pg, "recv", start, target.nbytes, kind="p2p")
    return out if out is not None else target


def _receive(buffer: torch.Tensor, peer: int, pg: ProcessGroup, tag: int) -> None:
    dist.recv(buffer, peer, group=pg.torch_group, tag=tag)


def _device(pg: ProcessGroup) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if pg.backend is Backend.NCCL else torch.device("cpu")


def _peer(pg: ProcessGroup, rank: int, name: str) -> int:
    """The global rank of a member that is not this one."""
    if pg.check_rank(rank, name) == pg.rank():
        raise InvalidRank(f"{name}={rank}: that is this rank itself, and nothing can be sent from a rank to itself.")
    return pg.ranks[rank]
