"""Data transfer of each collective once all ranks have called it.

Each function returns a callable that starts the transfer: called with the group, in the same order on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from axon_nb.comm import Backend, Handle, ProcessGroup, all_gather, all_reduce, broadcast, reduce_scatter
from axon_nb.comm.spans import now, record
from axon_nb.compat.horovod.runtime.operation import Begin, Blueprint, Operation
from axon_nb.compat.horovod.runtime.reduce_ops import Op, comm_op, finish_average, scale

__all__ = ["blueprint_of", "broadcasted", "exchanged", "gathered", "nothing", "placeholder", "reduced", "scattered"]


class _All:
    """Handle of several transfers as one."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = list(handles)

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()

    def is_completed(self) -> bool:
        return all(handle.done() for handle in self._handles)


def reduced(outputs: Sequence[torch.Tensor], op: Op, prescale: float = 1.0, postscale: float = 1.0) -> Begin:
    """Reduce tensors in place, merging those with the same dtype and device. Returns the tensors."""

    def begin(group: ProcessGroup, _: Sequence[int]) -> Handle:
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for output in outputs:
            kinds.setdefault((output.dtype, output.device), []).append(output)
        begun: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        handles = []
        for members in kinds.values():
            whole = members[0] if len(members) == 1 else torch.cat([member.reshape(-1) for member in members])
            scale(whole, prescale)
            begun.append((members, whole))
            handles.append(all_reduce(whole, comm_op(op), group=group, async_op=True))

        def finish() -> Sequence[torch.Tensor]:
            for members, whole in begun:
                if op is Op.AVERAGE:
                    finish_average(whole, group.size())
                scale(whole, postscale)
                if whole is not members[0]:
                    parts = whole.split([member.numel() for member in members])
                    for member, part in zip(members, parts, strict=True):
                        member.copy_(part.view(member.shape))
            return outputs

        return Handle(_All(handles), finish)

    return begin


def blueprint_of(tensors: Sequence[torch.Tensor], op: Op) -> Blueprint:
    """What a joined rank must know about an allreduce of these tensors."""
    return Blueprint(
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        dtypes=tuple(tensor.dtype for tensor in tensors),
        devices=tuple(tensor.device.type for tensor in tensors),
        op=int(op),
    )


def placeholder(blueprint: Blueprint) -> Operation:
    """The operation of a joined rank, with neutral values, such as zeros in a sum."""
    op = Op(blueprint.op)
    tensors = [
        torch.full(shape, _neutral(op, dtype), dtype=dtype, device=device)
        for shape, dtype, device in zip(blueprint.shapes, blueprint.dtypes, blueprint.devices, strict=True)
    ]
    return Operation("allreduce", "joined", "", reduced(tensors, op))


def _neutral(op: Op, dtype: torch.dtype) -> float | bool:
    if op in (Op.AVERAGE, Op.SUM):
        return 0
    if op is Op.PRODUCT:
        return 1
    if dtype is torch.bool:
        return op is Op.MIN
    if dtype.is_floating_point:
        return math.inf if op is Op.MIN else -math.inf
    limits = torch.iinfo(dtype)
    return limits.max if op is Op.MIN else limits.min


def gathered(tensor: torch.Tensor) -> Begin:
    """Gather the rows of all ranks, in rank order."""

    def begin(group: ProcessGroup, rows: Sequence[int]) -> Handle:
        longest = max(rows)
        padded = tensor
        if tensor.shape[0] < longest:
            padded = torch.cat([tensor, tensor.new_zeros((longest - tensor.shape[0], *tensor.shape[1:]))])
        handle: Handle = all_gather(padded, group=group, async_op=True)

        def finish() -> torch.Tensor:
            joined: torch.Tensor = handle.wait()
            if len(set(rows)) == 1:
                return joined
            parts = joined.split(longest)
            return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

        return Handle(handle, finish)

    return begin


def broadcasted(output: torch.Tensor, root: int) -> Begin:
    """Broadcast from the global rank `root`, in place. Returns the tensor."""

    def begin(group: ProcessGroup, _: Sequence[int]) -> Handle:
        handle: Handle = broadcast(output, src=group.ranks.index(root), group=group, async_op=True)
        return handle

    return begin


def scattered(tensor: torch.Tensor, op: Op, prescale: float = 1.0, postscale: float = 1.0) -> Begin:
    """Reduce and scatter rows; the first ranks get one remaining row each."""

    def begin(group: ProcessGroup, _: Sequence[int]) -> Handle:
        each, more = divmod(tensor.shape[0], group.size())
        whole = tensor.clone() if prescale != 1.0 else tensor
        scale(whole, prescale)
        if more:
            counts = [each + (rank < more) for rank in range(group.size())]
            blank = whole.new_zeros((1, *whole.shape[1:]))
            whole = torch.cat([torch.cat([part, blank])[: each + 1] for part in whole.split(counts)])
        handle: Handle = reduce_scatter(whole, comm_op(op), group=group, async_op=True)

        def finish() -> torch.Tensor:
            part: torch.Tensor = handle.wait()
            if op is Op.AVERAGE:
                finish_average(part, group.size())
            scale(part, postscale)
            return part[:each] if more and group.rank() >= more else part

        return Handle(handle, finish)

    return begin


def exchanged(tensor: torch.Tensor, splits: torch.Tensor) -> Begin:
    """Exchange `splits` rows with each rank; returns the received rows and how many came from each rank."""

    def begin(group: ProcessGroup, _: Sequence[int]) -> Handle:
        # Exchange sizes first and wait for them: all ranks are in this call.
        device = tensor.device if group.backend is Backend.NCCL else torch.device("cpu")
        matrix = all_gather(splits.to(device, torch.int64).view(1, -1), group=group)
        received = [int(count) for count in matrix[:, group.rank()].tolist()]
        # As bytes: Gloo supports only some dtypes here.
        row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
        outgoing = tensor.contiguous().view(-1).view(torch.uint8).view(tensor.shape[0], row_bytes)
        incoming = outgoing.new_empty((sum(received), row_bytes))
        start = now()
        work = dist.all_to_all_single(
            incoming,
            outgoing,
            received,
            [int(count) for count in splits.tolist()],
            group=group.torch_group,
            async_op=True,
        )

        def finish() -> tuple[torch.Tensor, torch.Tensor]:
            record(group, "all_to_all", start, tensor.nbytes)
            rows = incoming.view(-1).view(tensor.dtype).view(sum(received), *tensor.shape[1:])
            return rows, torch.tensor(received, dtype=splits.dtype, device=splits.device)

        return Handle(work, finish)

    return begin


def nothing() -> Begin:
    """Transfer nothing; the call only synchronises."""
    return lambda group, rows: Handle(None, lambda: None)
