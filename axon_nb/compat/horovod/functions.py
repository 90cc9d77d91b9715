"""Broadcast and gathering of parameters, optimizer state and objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle
import torch
from torch import nn

from axon_nb.compat.horovod.allgather import allgather
from axon_nb.compat.horovod.broadcast import broadcast_, broadcast_async_
from axon_nb.compat.horovod.runtime.handles import synchronize
from axon_nb.compat.horovod.runtime.process_sets import ProcessSet, global_process_set
from axon_nb.compat.horovod.runtime.state import current
from axon_nb.errors import UsageError

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Broadcast tensors from one rank to all ranks, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
        root_rank: Global rank of the source.
        process_set: The participating ranks.

    Raises:
        UsageError: an entry is not a tensor.
        HorovodInternalError: a tensor differs in shape or dtype between ranks; the message names it.
    """
    if isinstance(params, Mapping):
        items: list[tuple[str | None, Any]] = sorted(params.items())
    elif hasattr(params, "__iter__") and not isinstance(params, str | torch.Tensor):
        items = [item if isinstance(item, tuple) else (None, item) for item in params]
    else:
        raise UsageError(f"invalid params of type: {type(params)}; use model.state_dict() or model.named_parameters().")
    for name, tensor in items:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"broadcast_parameters: {name or 'an entry'} has type {type(tensor).__name__}: must be a tensor; "
                "use hvd.broadcast_object for other objects."
            )
    # In the order of the ranks' own lists: by name where they have one.
    handles = [broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in items]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Broadcast optimizer state and options, such as the learning rate, from one rank to all ranks.

    Args:
        optimizer: A torch optimizer, distributed or not, over the same parameters on all ranks.
        root_rank: Global rank of the source.
        model: Ignored; for compatibility with Horovod.
        process_set: The participating ranks.
    """
    tensors: list[torch.Tensor] = []

    def outlined(tensor: torch.Tensor) -> _Outline:
        tensors.append(tensor)
        return _Outline(tensor)

    def filled(outline: _Outline) -> torch.Tensor:
        tensors.append(outline.empty())
        return tensors[-1]

    if current().rank == root_rank:
        outline = _with_each(optimizer.state_dict(), torch.Tensor, outlined)
        broadcast_object(outline, root_rank, "optimizer.outline", process_set)
        state: Any = None
    else:
        outline = broadcast_object(None, root_rank, "optimizer.outline", process_set)
        state = _with_each(outline, _Outline, filled)
    handles = [
        broadcast_async_(tensor, root_rank, f"optimizer.{number}", process_set) for number, tensor in enumerate(tensors)
    ]
    for handle in handles:
        synchronize(handle)
    if state is not None:
        optimizer.load_state_dict(state)


class _Outline:
    """A tensor without its values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape, self._dtype, self._device = tuple(tensor.shape), tensor.dtype, tensor.device.type

    def empty(self) -> torch.Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)


def _with_each(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """Copy a state dict, replacing each object of a given type, in order."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, dict):
        return {key: _with_each(item, kind, replace) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_each(item, kind, replace) for item in value)
    return value


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Broadcast an object from one rank to all ranks.

    Args:
        obj: Any picklable object; ignored on ranks other than the root.
        root_rank: Global rank of the source.
        name: Name of the collective; None for an automatic one.
        process_set: The participating ranks.

    Returns:
        The object itself on the root, a copy elsewhere.
    """
    here = current().rank == root_rank
    content = _bytes_of(obj) if here else torch.empty(0, dtype=torch.uint8)
    names = (None, None) if name is None else (f"{name}.sz", f"{name}.t")
    count = broadcast_(torch.tensor([content.numel()]), root_rank, names[0], process_set)
    if not here:
        content = content.new_empty(int(count))
    broadcast_(content, root_rank, names[1], process_set)
    return obj if here else _object_of(content)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Gather objects from all ranks, in rank order.

    Args:
        obj: Any picklable object.
        name: Name of the collective; None for an automatic one.
        process_set: The participating ranks.
    """
    content = _bytes_of(obj)
    names = (None, None) if name is None else (f"{name}.sz", f"{name}.t")
    counts = allgather(torch.tensor([content.numel()]), names[0], process_set)
    everything = allgather(content, names[1], process_set)
    return [_object_of(part) for part in everything.split(counts.tolist())]


def _bytes_of(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)


def _object_of(content: torch.Tensor) -> Any:
    return cloudpickle.loads(content.numpy().tobytes())
