"""broadcast and alltoall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from axon_nb.compat.horovod.allreduce import allreduce
from axon_nb.compat.horovod.runtime.handles import begin, checked, synchronize
from axon_nb.compat.horovod.runtime.negotiation import Channel
from axon_nb.compat.horovod.runtime.operation import Operation, described
from axon_nb.compat.horovod.runtime.process_sets import ProcessSet, channel_of, global_process_set
from axon_nb.compat.horovod.runtime.reduce_ops import Op
from axon_nb.compat.horovod.runtime.state import current
from axon_nb.compat.horovod.runtime.transfers import broadcasted, exchanged
from axon_nb.errors import UsageError

__all__ = ["alltoall", "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]


def _begin_broadcast(output: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> int:
    channel = channel_of(process_set)
    if root_rank not in channel.ranks:
        raise UsageError(
            f"hvd.broadcast: root_rank={root_rank} is not in the process set; its global ranks are "
            f"{list(channel.ranks)}."
        )
    value = checked(output, "broadcast")
    operation = Operation(
        "broadcast",
        channel.next_name("broadcast") if name is None else name,
        f"{described([value])} with root rank {root_rank}",
        broadcasted(value, root_rank),
    )
    return begin(channel, [operation], lambda results: output)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start broadcasting a tensor from one rank; `tensor` is not changed. See `broadcast`.

    Returns:
        A handle for `poll` and `synchronize`.
    """
    output = checked(tensor, "broadcast").clone(memory_format=torch.contiguous_format)
    return _begin_broadcast(output, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start broadcasting a tensor from one rank, in place. See `broadcast`.

    Returns:
        A handle for `poll` and `synchronize`.
    """
    return _begin_broadcast(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Broadcast a tensor from one rank, in place, and return it. See `broadcast`."""
    result: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Broadcast a tensor from one rank to all ranks.

    Args:
        tensor: Same dtype and shape on all ranks; not changed.
        root_rank: Global rank of the source, also within process sets.
        name: Name of the collective; None for an automatic one.
        process_set: The participating ranks.

    Returns:
        A new tensor. In backward the root gets the mean of all gradients, the others get zeros, as in Horovod.
    """
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return result


class _Broadcast(torch.autograd.Function):
    """Broadcast whose backward averages the gradients for the root."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        """Broadcast."""
        ctx.root_rank, ctx.process_set = root_rank, process_set
        result: torch.Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Average, for the root."""
        average = allreduce(gradients[0], op=Op.AVERAGE, process_set=ctx.process_set)
        own = average if current().rank == ctx.root_rank else torch.zeros_like(average)
        return own, None, None, None


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start exchanging rows. See `alltoall`.

    Returns:
        A handle for `poll` and `synchronize`, which returns the received rows and how many came from each rank.
    """
    channel = channel_of(process_set)
    value = checked(tensor, "alltoall")
    counts = _splits(value, splits, channel)
    operation = Operation(
        "alltoall",
        channel.next_name("alltoall") if name is None else name,
        described([value], any_rows=True),
        exchanged(value.clone(), counts),
    )
    return begin(channel, [operation], lambda results: results[0])


def _splits(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, channel: Channel) -> torch.Tensor:
    size = len(channel.ranks)
    if not tensor.ndim:
        raise UsageError(
            "hvd.alltoall of a rank-zero tensor: it exchanges rows, so the tensor needs at least one dimension."
        )
    rows = int(tensor.shape[0])
    if splits is None:
        if rows % size:
            raise UsageError(
                f"hvd.alltoall of {rows} rows without splits: the number must be a multiple of {size} ranks; pass "
                "`splits` for unequal parts."
            )
        return torch.full((size,), rows // size, dtype=torch.int32)
    counts = splits if isinstance(splits, torch.Tensor) else torch.tensor(list(splits), dtype=torch.int32)
    if counts.is_floating_point() or counts.is_complex() or counts.dtype is torch.bool:
        raise UsageError(f"hvd.alltoall with splits of {counts.dtype}: splits must be integers, such as torch.int32.")
    if counts.shape != (size,) or bool((counts < 0).any()) or int(counts.sum()) > rows:
        raise UsageError(
            f"hvd.alltoall with splits={counts.tolist()} of {rows} rows: pass one number >= 0 for each of "
            f"{size} ranks; their sum must not exceed the number of rows."
        )
    return counts


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of this rank's tensor to each rank, and receive rows from each rank.

    Args:
        tensor: Same dtype and shape on all ranks, except for the size of dim 0; not changed.
        splits: Number of rows for each rank, in rank order; None for equal parts.
        name: Name of the collective; None for an automatic one.
        process_set: The participating ranks.

    Returns:
        The received rows in rank order; with `splits` also how many rows came from each rank.
    """
    return _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]


class _Alltoall(torch.autograd.Function):
    """Exchange of rows; backward sends gradients back to the source ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        """Exchange."""
        rows, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.received, ctx.rows = process_set, received, tensor.shape[0]
        if splits is None:
            return rows
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Exchange back."""
        back, _ = synchronize(alltoall_async(gradients[0], ctx.received, process_set=ctx.process_set))
        if back.shape[0] < ctx.rows:  # rows that went to no rank
            back = torch.cat([back, back.new_zeros((ctx.rows - back.shape[0], *back.shape[1:]))])
        return back, None, None, None
