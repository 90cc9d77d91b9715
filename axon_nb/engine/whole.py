"""Values made fit to travel: split tensors put together, everything on the CPU, without history of autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from axon_nb.engine.sharded import is_dtensor, is_sharded
from axon_nb.errors import UsageError

__all__ = ["as_arrays", "local_value", "portable", "split_over", "whole_value"]


def _convert(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The value with each tensor changed that is in it, in its dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = {key: _convert(item, change) for key, item in value.items()}
        if type(value) is dict:
            return changed
        made = copy.copy(value)  # such as a state_dict, which carries versions besides its entries
        made.update(changed)
        return made
    if type(value) in (list, tuple):
        return type(value)(_convert(item, change) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(_convert(item, change) for item in value)
    return value


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def split_over(value: Any) -> set[int]:
    """The ranks that hold parts of the distributed tensors in a value; empty when each rank has all of it.

    Raises:
        UsageError: a module or an optimizer with such tensors inside: it cannot leave its ranks as an object.
    """
    found: set[int] = set()
    inside: list[Any] = []
    if isinstance(value, torch.nn.Module):
        inside = [*value.parameters(), *value.buffers()]
    elif isinstance(value, torch.optim.Optimizer):
        inside = [parameter for group in value.param_groups for parameter in group["params"]]
    if (is_sharded(value) and not is_dtensor(value)) or any(map(is_dtensor, inside)):
        raise UsageError("a module or optimizer that is split over ranks stays there: take its state_dict()")
    for tensor in _tensors(value):
        if is_dtensor(tensor) and not all(placement.is_replicate() for placement in tensor.placements):
            found.update(int(rank) for rank in tensor.device_mesh.mesh.flatten().tolist())
    return found


def whole_value(value: Any, *, keep: bool) -> Any:
    """The value with its distributed tensors whole, on the CPU; collective over the ranks that hold parts.

    Args:
        value: What `split_over` was asked of.
        keep: Whether this rank needs the result; elsewhere each tensor is let go of before the next is put together.
    """

    def change(tensor: Any) -> Any:
        full = tensor.detach().full_tensor() if is_dtensor(tensor) else tensor.detach()
        return full.cpu() if keep else None

    return _convert(value, change)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_value(value: Any) -> Any:
    """The value with this rank's own parts in the place of distributed tensors."""
    return _convert(value, _local)


def portable(value: Any) -> Any:
    """The value with its tensors on the CPU and without history."""
    return _convert(value, lambda tensor: tensor.detach().cpu())


def as_arrays(value: Any) -> Any:
    """The value with NumPy arrays in the place of tensors; bfloat16 and float8, which NumPy lacks, become float32."""

    def change(tensor: torch.Tensor) -> Any:
        dense = tensor.detach().cpu().resolve_conj().resolve_neg()
        known = dense.dtype.itemsize > 2 or not dense.is_floating_point() or dense.dtype is torch.float16
        return (dense if known else dense.float()).numpy()

    return _convert(value, change)
