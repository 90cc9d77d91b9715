"""Giving all ranks one rank's parameters, optimizer state and objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle
import torch
from torch import nn

from axon_nb.compat.horovod.gathering import allgather
from axon_nb.compat.horovod.handles import synchronize
from axon_nb.compat.horovod.moving import broadcast_, broadcast_async_
from axon_nb.compat.horovod.process_sets import ProcessSet, global_process_set
from axon_nb.compat.horovod.state import current
from axon_nb.errors import UsageError

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Give all ranks the tensors of one, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
        root_rank: Whose tensors; counted among all ranks.
        process_set: The ranks that take part.

    Raises:
        UsageError: these are no tensors.
        HorovodInternalError: a tensor differs in shape or dtype between ranks; names it.
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
                f"broadcast_parameters: {name or 'an entry'} is a {type(tensor).__name__}, and tensors are broadcast; "
                "hvd.broadcast_object takes anything."
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
    """Give all ranks the optimizer state and the options (learning rate and so on) of one.

    Args:
        optimizer: One of torch's, distributed or not, over the same parameters on all ranks.
        root_rank: Whose state; counted among all ranks.
        model: Not needed; Horovod's parameter.
        process_set: The ranks that take part.
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
    """A state dict with each object of a kind replaced, in its order."""
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
    """Give every rank an object of one.

    Args:
        obj: Anything that can be pickled; on other ranks than the root it is not looked at.
        root_rank: Whose object; counted among all ranks.
        name: The collective's name; None: a running number.
        process_set: The ranks that take part.

    Returns:
        The root's own object on the root, a copy of it on the others.
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
    """The objects of all ranks, in the order of ranks.

    Args:
        obj: Anything that can be pickled.
        name: The collective's name; None: a running number.
        process_set: The ranks that take part.
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
