"""Calls that were begun and not waited for, by number; polling and waiting for them; joining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from axon_nb.comm import CommError
from axon_nb.compat.horovod.errors import HorovodInternalError
from axon_nb.compat.horovod.negotiation import Channel
from axon_nb.compat.horovod.operation import Operation
from axon_nb.compat.horovod.process_sets import ProcessSet, channel_of, global_process_set
from axon_nb.compat.horovod.state import current
from axon_nb.compat.horovod.transfers import nothing
from axon_nb.errors import UsageError

__all__ = ["barrier", "begin", "checked", "join", "poll", "synchronize"]


def checked(tensor: Any, what: str) -> torch.Tensor:
    """`tensor`, detached from the graph.

    Raises:
        UsageError: it is no tensor, or a sparse one.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"hvd.{what} of {type(tensor).__name__}: it takes a torch.Tensor; torch.tensor(value) is one.")
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"hvd.{what} of a tensor of layout {tensor.layout}: use hvd.sparse_allreduce_async, or tensor.to_dense()."
        )
    return tensor.detach()


def begin(channel: Channel, operations: Sequence[Operation], collect: Callable[[list[Any]], Any]) -> int:
    """Call operations; the number by which they are polled and waited for.

    Args:
        channel: Of the process set.
        operations: What is called, in the same order on all ranks.
        collect: Makes what `synchronize` returns of what the operations give.
    """
    state = current()
    for operation in operations:
        channel.call(operation)
    handle, state.next_handle = state.next_handle, state.next_handle + 1
    state.handles[handle] = (channel, tuple(operations), collect)
    return handle


def poll(handle: int) -> bool:
    """Whether a call is over, so that `synchronize` returns at once.

    Args:
        handle: What an asynchronous call returned.
    """
    entry = current().handles.get(handle)
    if entry is None:
        return True
    channel, operations, _ = entry
    over = [channel.poll(operation) for operation in operations]  # all are asked, so that all go on
    return all(over)


def synchronize(handle: int) -> Any:
    """Wait until a call is over; what the collective returns. None when it was waited for already.

    Args:
        handle: What an asynchronous call returned.

    Raises:
        HorovodInternalError: ranks brought what does not fit together, or one is gone, or the cell was ended meanwhile.
    """
    state = current()
    if handle in state.lost:
        state.lost.discard(handle)
        raise HorovodInternalError(
            f"handle {handle}: the cell in which this call was begun was ended, and the call with it; call it again."
        )
    entry = state.handles.get(handle)
    if entry is None:
        return None
    channel, operations, collect = entry
    results, failure = [], None
    for operation in operations:
        try:
            results.append(channel.finish(operation))
        except (HorovodInternalError, CommError) as error:
            failure = failure or error
    state.handles.pop(handle, None)
    if failure is not None:
        raise failure
    return collect(results)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set is here."""
    channel = channel_of(process_set)
    operation = Operation("barrier", channel.next_name("barrier"), "barrier", nothing())
    channel.call(operation)
    channel.finish(operation)


def join(device: int = -1) -> int:
    """This rank has no more data: take part in the allreduces of the others with zeros until all ranks have joined.

    Args:
        device: Ignored: zeros are made where the others have their tensors.

    Returns:
        The rank that joined last.
    """
    return channel_of(global_process_set).join()
