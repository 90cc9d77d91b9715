"""Giving a group of torch's own a fresh backend: whoever holds the group goes on with it.

A private hook: torch keeps one backend for each backend type of a group, and a second one registered under the same
type is ignored. The types behind the named ones are free, so each swap takes the next.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.engine.groups.abort import GroupBroken

__all__ = ["MAX_SWAPS", "missing_swap_hooks", "swap_backend", "swaps_left"]

_FIRST_TYPE = 7
_LAST_TYPE = 255
MAX_SWAPS = _LAST_TYPE - _FIRST_TYPE + 1
"""How often one group can get a fresh backend."""

_next_type: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def missing_swap_hooks() -> list[str]:
    """Names of the hooks that this torch does not have."""
    names = ("_get_backend", "_register_backend", "_set_group_desc", "_set_group_name", "bound_device_id")
    return [name for name in names if not hasattr(dist.ProcessGroup, name)]


def swaps_left(group: dist.ProcessGroup) -> int:
    """How often `group` can still get a fresh backend."""
    return _LAST_TYPE + 1 - _next_type.get(group, _FIRST_TYPE)


def swap_backend(group: dist.ProcessGroup, backend: Any, device: torch.device) -> None:
    """From now on `group` communicates tensors of `device` through `backend`; call it on the main thread.

    The default backend type stays what it was: torch derives the group's name ("nccl") from it, and knows no name for
    the types used here. What torch asks of the type's old backend is hooks and sequence numbers, never communication.

    Args:
        group: A group with no operation under way.
        backend: Connected to the same peers in the same order.
        device: With its index, unless it is the CPU: barriers use it.

    Raises:
        GroupBroken: this was done 249 times.
    """
    number = _next_type.get(group, _FIRST_TYPE)
    if number > _LAST_TYPE:
        raise GroupBroken(
            f"group {group.group_name!r} has been formed anew {MAX_SWAPS} times, and torch allows no more: "
            "`%distributed restart` starts the ranks afresh."
        )
    _next_type[group] = number + 1
    name, desc = group.group_name, group.group_desc
    if device.type != "cpu":
        group.bound_device_id = device  # the backend takes it over; a barrier asks for it
    group._register_backend(torch.device(device.type), dist.ProcessGroup.BackendType(number), backend)
    # Name and description live in the backend.
    group._set_group_name(name)
    group._set_group_desc(desc)
