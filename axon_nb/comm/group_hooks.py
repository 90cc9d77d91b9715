"""What calls torch's own groups make, from the hooks that they run before each call: torch has them since 2.14.

They run in the dispatcher, so also for functional collectives and for what DDP and FSDP call. torch's groups on older
versions report none, and groups of cells and of mock worlds report their calls themselves: they are written in Python,
and torch runs no hooks for them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from axon_nb.records.hooks import hook, missing_hooks

_HOOK_ID = 0x61786F6E
_OPERATIONS = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "ALLTOALL": "all_to_all",
    "REDUCE_SCATTER": "reduce_scatter",
    **{name.upper(): name for name in ("barrier", "broadcast", "gather", "recv", "reduce", "scatter", "send")},
}
"""By the beginning of torch's name for them; the longest counts."""
_INPUT_ONLY = frozenset({"all_reduce", "broadcast", "reduce", "send"})
_watched: list[Any] = []


def watch(report: Callable[..., None]) -> None:
    """Report the calls of all groups of torch's own that this process has now, until `unwatch`.

    Args:
        report: Called before each with the operation, its tensors (outputs first, as torch's methods take them), the
            rank within the group, a function that returns the group's global ranks, and the other side of a message.
    """
    if not hook("comm.group_hooks").is_used or missing_hooks("comm.group_hooks") or not dist.is_initialized():
        return
    for group in list(c10d._world.pg_map):
        if type(group) is dist.ProcessGroup and not is_watched(group):
            ranks = dist.get_process_group_ranks(group)
            hooked: Any = group
            hooked.register_pre_hook(_HOOK_ID, functools.partial(_before, report, ranks, group.rank()))
            _watched.append(group)


def unwatch() -> None:
    """Report no more calls."""
    while _watched:
        with contextlib.suppress(RuntimeError):  # the group was destroyed
            _watched.pop().unregister_pre_hook(_HOOK_ID)


def is_watched(group: Any) -> bool:
    """Whether calls of a group are reported."""
    return any(group is other for other in _watched)


def _before(report: Callable[..., None], ranks: list[int], place: int, call: Any) -> None:
    name = max((start for start in _OPERATIONS if call.name.name.startswith(start)), key=len, default="")
    if not name:  # no communication, such as a split
        return
    operation, inputs, outputs = _OPERATIONS[name], call.input_tensors, call.output_tensors
    if operation == "all_to_all" and len(inputs) == 1:  # of one tensor
        inputs = inputs[0]
    tensors = (inputs,) if operation in _INPUT_ONLY else (outputs, inputs)
    report(operation, tensors, place, lambda: ranks, call.root if operation in ("send", "recv") else -1)
