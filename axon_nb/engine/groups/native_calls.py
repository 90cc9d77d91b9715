"""Checks calls of torch's own groups, as on NCCL, before they start: by torch's hooks, since 2.14.

A call that ranks outside the cell would have to make is refused, and so is one that differs from what another rank of
this host has started at its place: another operation, root, dtype or size. Not compared are what the hooks do not know
(reduction, splits, tags), messages, and lists of unequal tensors, which NCCL gathers and scatters, too.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from axon_nb.comm.calls import before_calls
from axon_nb.engine.groups.size_check import SizeTable, open_size_table
from axon_nb.engine.groups.state import GroupsState

_METHODS = {"all_gather": "allgather", "all_reduce": "allreduce"}
"""Names in the table of sizes that differ from those of the operations."""
_MESSAGES = frozenset({"recv", "send"})


class CallChecks:
    """Checks the calls of this rank's groups, each from its creation on.

    Args:
        root: The store that all ranks can reach.
        state: What the groups share.
    """

    def __init__(self, root: Store, state: GroupsState) -> None:
        self._root = root
        self._state = state
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _Checked] = weakref.WeakKeyDictionary()

    def begin(self, group: dist.ProcessGroup, epoch: int) -> None:
        """Compare a group's calls with those of other ranks from now on, before any rank connects.

        Args:
            group: A new group, or one that is rebuilt.
            epoch: How often the groups have been rebuilt.
        """
        checked = self._groups.get(group) or _Checked(group, self._state)
        self._groups[group] = checked
        if not checked.has_hooks:
            return
        name, rank, size = str(group.group_name), group.rank(), group.size()
        checked.compare(open_size_table(self._root, self._state, name=name, epoch=epoch, rank=rank, size=size))


class _Checked:
    def __init__(self, group: dist.ProcessGroup, state: GroupsState) -> None:
        self._group = weakref.ref(group)  # which keeps this
        self._calls = state.calls
        self._table: SizeTable | None = None
        self._sequence = 0
        self.has_hooks = before_calls(group, self._before, self._started) is not None

    def compare(self, table: SizeTable | None) -> None:
        if self._table is not None:
            self._table.close()
        self._table, self._sequence = table, 0

    def _before(self, operation: str, tensors: tuple[Any, ...], root: int) -> None:
        group, calls = self._group(), self._calls
        if group is None:
            return
        is_message = operation in _MESSAGES
        if calls.exclusive is not None:
            name = "recv_anysource" if operation == "recv" and root < 0 else operation
            calls.refusal_reason(group, name, root if is_message else -1)
        if self._table is None or is_message or not all(map(_are_equal, tensors)):
            return
        arguments = (*tensors, SimpleNamespace(rootRank=root))
        name = _METHODS.get(operation, operation)
        self._table.check_collective(name, arguments, self._sequence + 1, lambda: dist.get_process_group_ranks(group))

    def _started(self, operation: str) -> None:
        self._sequence += operation not in _MESSAGES


def _are_equal(tensors: Any) -> bool:
    return type(tensors) is not list or len(tensors) < 2 or len({tensor.numel() for tensor in tensors}) == 1
