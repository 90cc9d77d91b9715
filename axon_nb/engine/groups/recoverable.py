"""A process group that survives an abort: torch's group API over an inner Gloo group that can be replaced.

Objects that hold the group (DDP, FSDP2, DTensor meshes, pipelines) keep it; `reform` gives it a fresh inner group. On
Gloo this is the only way: it has no abort, and a poisoned backend cannot be mended.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from axon_nb.comm.shared_memory.group import SharedMemoryGroup, caller_line
from axon_nb.comm.torch_group import PythonProcessGroup
from axon_nb.engine.groups import activity
from axon_nb.engine.groups.abort import Aborted, GroupBroken, is_to_stop, raise_at_cut, raise_if_aborted
from axon_nb.engine.groups.gloo import PartOfSum, connect, in_sight, leak, poison
from axon_nb.engine.groups.size_check import Table, open_table
from axon_nb.engine.groups.store import wait_for_all
from axon_nb.engine.groups.work import RecoverableWork
from axon_nb.records.environment import TRANSPORT
from axon_nb.records.spans import emit, span_of

__all__ = ["RecoverableGroup", "operations"]

_BACKEND = "axon_nb"
_GLOO = dist.ProcessGroup.BackendType.GLOO
_CPU = torch.device("cpu")
_POINT_TO_POINT = frozenset({"recv", "recv_anysource", "send"})
_SCATTERING = frozenset({"_reduce_scatter_base", "reduce_scatter_single"})
# Gloo gives these a work whose wait takes a limit and can be repeated. The others lose their connection at a limit
# (send, recv) or ignore it (reduce_scatter).
_SLICED = frozenset(
    {
        "_allgather_base",
        "all_gather_single",
        "all_to_all_single",
        "allgather",
        "allreduce",
        "allreduce_coalesced",
        "alltoall_base",
        "barrier",
        "broadcast",
        "gather",
        "reduce",
        "scatter",
    }
)
# Names differ between versions of torch (`_allgather_base` became `all_gather_single`), and newer ones have more. An
# operation that is not known here is waited for in a helper thread, which is right for any.
_OPERATION = re.compile("_?(all|barrier|broadcast|gather|recv|reduce|scatter|send)")


def operations() -> list[str]:
    """The operations of torch's `ProcessGroup` that are wrapped, by name."""
    return [name for name in dir(dist.ProcessGroup) if _OPERATION.match(name)]


class RecoverableGroup(PythonProcessGroup):
    """See the module.

    Args:
        root: The store that all ranks reach; each forming uses a prefix of its own.
        epoch: How often the groups have been formed before.
        rank: This process's rank in the group.
        size: Number of ranks in the group.
        timeout: Limit of the group's operations.
        name: torch's name of the group, the same on all its ranks.
        global_rank: This process's rank in the default group.
        members: Global ranks of the group, for messages; by default those from 0 on.
    """

    def __init__(
        self,
        root: Store,
        *,
        epoch: int,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        global_rank: int,
        members: Sequence[int] = (),
    ) -> None:
        super().__init__(rank, size, name, backend=_BACKEND)
        self.emits_spans = True
        """`axon_nb.comm` need not record calls on this group."""
        self._root = root
        self._timeout = timeout
        self._global_rank = global_rank
        self._global_ranks = members
        self._inner: Any = None
        self._table: Table | None = None
        self.sequence = 0
        """How many collectives this rank has begun in the group since it was formed."""
        if name != "0":  # the default group: all come to it at their start
            wait_for_all(root, f"arrived{epoch}/{name}", rank=rank, size=size, limit=timeout)
        self.reform(epoch)

    def reform(self, epoch: int) -> None:
        """Connect a fresh inner group; collective over the group's ranks.

        Raises:
            Aborted: an abort came meanwhile.
            RuntimeError: a peer did not come.
        """
        if self._table is not None:
            self._table.close()
        store = PrefixStore(f"epoch{epoch}/{self._name}/", self._root)
        inner = self._share_memory(store) if TRANSPORT.get() == "shm" else self._connect(store, epoch)
        if self._inner is not None:
            # A rank that had ended its cell was not told to abort: its connections to others like it are still open.
            self._drop_inner()
        self.sequence = 0
        self._inner = inner

    def _drop_inner(self) -> None:
        self.poison()
        if isinstance(self._inner, SharedMemoryGroup):
            self._inner.shutdown()
        else:
            leak(self._inner)

    def _share_memory(self, store: Store) -> SharedMemoryGroup:
        return SharedMemoryGroup(
            store,
            rank=self._own_rank,
            size=self._size,
            timeout=self._timeout,
            name=self._name,
            members=self._global_ranks,
            give_up=raise_if_aborted,
            line=caller_line,
            runs_in_wait=True,
        )

    def _connect(self, store: Store, epoch: int) -> dist.ProcessGroup:
        """The inner group over Gloo."""
        # Before connecting: when the ranks are connected, each has cleared its part.
        self._table = open_table(self._root, name=self._name, epoch=epoch, rank=self._own_rank, size=self._size)
        backend = connect(store, self._own_rank, self._size, timeout=self._timeout, give_up=raise_if_aborted)
        inner = dist.ProcessGroup(store, self._own_rank, self._size)
        for device in _devices():
            inner._register_backend(device, _GLOO, backend)
        inner._set_default_backend(_GLOO)
        inner._set_group_name(self._name)
        inner._set_group_desc(self._desc)
        return inner

    def give_up(self) -> None:
        """Not all of the group's ranks have it: it is not formed anew, and says so when it is used."""
        self._drop_inner()

        def refuse(name: str, *_: Any) -> Any:
            raise GroupBroken(
                f"{name} is not possible: group {self._name!r} is not on all of its ranks; make it again with "
                "`dist.new_group` on all ranks."
            )

        self.run = refuse

    def poison(self) -> None:
        """From any thread: end all waits in this group on this rank."""
        self.poisoner()()

    def poisoner(self) -> Callable[[], None]:
        """What poisons the group as it is now: called late, it leaves alone what was formed anew meanwhile."""
        if isinstance(self._inner, SharedMemoryGroup):
            return self._inner.abort
        return functools.partial(poison, self._inner._get_backend(_CPU))

    def run(self, name: str, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin one operation on the inner group."""
        raise_if_aborted(name)
        paired = name in _POINT_TO_POINT
        peer = _peer(name, args) if paired else -1
        refusal = activity.refusal(self, name, peer) if activity.is_alone() else ""
        if paired:
            sequence = 0
            if self._table is not None:
                self._table.compare_pair(name, args, self._members)
        else:
            if is_to_stop():
                raise_at_cut(self.sequence + 1, activity.collectives() + 1, group=self._name, name=name)
            self.sequence = sequence = self.sequence + 1
            if self._table is not None:
                self._table.compare(name, args, sequence, self._members)
        call = activity.begin(name, self._name, sequence, peer, _payload(args))
        if refusal:
            call.refusal = refusal
        try:
            if isinstance(self._inner, SharedMemoryGroup):
                work, sliced = getattr(self._inner, name)(*args, **kwargs), True
            else:
                work = operation(self._inner, *args, **kwargs)
                sliced = name in _SLICED or type(work) is PartOfSum
        except RuntimeError as error:
            activity.end(call)
            if "gloo" in str(error).lower() and "closed" in str(error).lower():
                raise Aborted(f"peer lost in {name}: {str(error)[-120:]}") from None
            raise
        return RecoverableWork(work, call, sliced=sliced, keep=args, on_end=self._ended, limit=self._timeout)

    def _ended(self, call: activity.Call) -> None:
        activity.end(call)
        sequence, end = call.sequence, time.monotonic_ns()
        kind = "collective" if sequence else "p2p"
        rank, group = self._global_rank, self._name
        emit(span_of((rank, kind, call.name, call.started_ns, end, group, call.bytes, -1, -1, sequence)))
        if call.waited_ns:
            emit(span_of((rank, "wait", call.name, call.waited_ns, end, group, 0, -1, -1, sequence)))

    def _members(self) -> list[int]:
        return dist.get_process_group_ranks(self)

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        if isinstance(self._inner, SharedMemoryGroup):
            return self._inner.monitored_barrier(*args, **kwargs)
        return dist.ProcessGroup.monitored_barrier(self._inner, *args, **kwargs)

    def abort(self) -> None:
        """End all waits in this group on this rank."""
        self.poison()

    def shutdown(self) -> None:
        """End the threads of a group over shared memory."""
        if isinstance(self._inner, SharedMemoryGroup):
            self._inner.shutdown()

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self._inner._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        super()._set_group_desc(desc)
        self._inner._set_group_desc(desc)

    setGroupName = _set_group_name
    setGroupDesc = _set_group_desc

    def _get_backend(self, device: torch.device) -> Any:
        return self._inner._get_backend(device)

    def _get_sequence_number_for_group(self) -> int:
        return int(self._inner._get_sequence_number_for_group())

    def _start_coalescing(self, device: torch.device) -> Any:
        return self._inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._inner._end_coalescing(device)

    @property
    def _device_types(self) -> list[torch.device]:
        return _devices()


def _devices() -> list[torch.device]:
    return [_CPU, torch.device("cuda")] if torch.cuda.is_available() else [_CPU]


def _peer(name: str, args: tuple[Any, ...]) -> int:
    return int(args[1]) if name in ("send", "recv") and len(args) > 1 else -1


def _payload(args: tuple[Any, ...]) -> int:
    first = args[0] if args else None
    if type(first) is list and len(first) == 1:
        first = first[0]  # as most calls have it
    if type(first) is torch.Tensor:
        return first.nbytes
    if isinstance(first, (list, tuple)) and first and isinstance(first[0], (list, tuple)):
        first = first[0]
    if isinstance(first, (list, tuple)):
        return sum(item.nbytes for item in first if isinstance(item, torch.Tensor))
    return first.nbytes if isinstance(first, torch.Tensor) else 0


def _wrapped(name: str) -> Callable[..., Any]:
    operation = getattr(dist.ProcessGroup, name)
    if name in _SCATTERING:
        operation = in_sight(operation)

    def call(self: RecoverableGroup, *args: Any, **kwargs: Any) -> Any:
        return self.run(name, operation, args, kwargs)

    call.__name__ = name
    return call


for _name in operations():
    setattr(RecoverableGroup, _name, _wrapped(_name))
