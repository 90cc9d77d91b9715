"""Handles of asynchronous calls: poll, synchronize, barrier and join."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from axon_nb.comm import CommError
from axon_nb.compat.horovod.runtime.errors import HorovodInternalError
from axon_nb.compat.horovod.runtime.negotiation import Channel
from axon_nb.compat.horovod.runtime.operation import Operation
from axon_nb.compat.horovod.runtime.process_sets import ProcessSet, channel_of, global_process_set
from axon_nb.compat.horovod.runtime.state import current
from axon_nb.compat.horovod.runtime.transfers import nothing
from axon_nb.errors import UsageError

__all__ = ["barrier", "begin", "checked", "join", "poll", "synchronize"]


def checked(tensor: Any, what: str) -> torch.Tensor:
    """Check `tensor` and detach it from the graph.

    Raises:
        UsageError: it is not a tensor, or a sparse one.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"hvd.{what} needs a torch.Tensor, such as torch.tensor(value); got {type(tensor).__name__}.")
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"hvd.{what} does not support layout {tensor.layout}: use hvd.sparse_allreduce_async or tensor.to_dense()."
        )
    return tensor.detach()


def begin(channel: Channel, operations: Sequence[Operation], collect: Callable[[list[Any]], Any]) -> int:
    """Call operations; return a handle for `poll` and `synchronize`.

    Args:
        channel: Channel of the process set.
        operations: Operations in the same order on all ranks.
        collect: Combines the operations' results to what `synchronize` returns.
    """
    state = current()
    for operation in operations:
        channel.call(operation)
    handle, state.next_handle = state.next_handle, state.next_handle + 1
    state.handles[handle] = (channel, tuple(operations), collect)
    return handle


def poll(handle: int) -> bool:
    """Whether a call has finished, so that `synchronize` returns at once.

    Args:
        handle: The handle of an asynchronous call.
    """
    entry = current().handles.get(handle)
    if entry is None:
        return True
    channel, operations, _ = entry
    over = [channel.poll(operation) for operation in operations]  # poll all, so that all make progress
    return all(over)


def synchronize(handle: int) -> Any:
    """Wait for a call and return its result; None if it was waited for before.

    Args:
        handle: The handle of an asynchronous call.

    Raises:
        HorovodInternalError: the ranks' calls do not match, a rank is gone, or the cell was aborted.
    """
    state = current()
    if handle in state.lost:
        state.lost.discard(handle)
        raise HorovodInternalError(f"handle {handle}: this call was aborted together with its cell; call it again.")
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
    """Wait until every rank of the set has called this."""
    channel = channel_of(process_set)
    operation = Operation("barrier", channel.next_name("barrier"), "barrier", nothing())
    channel.call(operation)
    channel.finish(operation)


def join(device: int = -1) -> int:
    """Signal that this rank has no more data; it joins the other ranks' allreduces with zeros until all have joined.

    Args:
        device: Ignored: zeros are created on the device of the others' tensors.

    Returns:
        The rank that joined last.
    """
    return channel_of(global_process_set).join()
