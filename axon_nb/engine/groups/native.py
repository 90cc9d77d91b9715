"""Recovery of groups that are torch's own: all backends aborted at once, fresh ones put under the same groups.

For backends with an abort that works, which is NCCL: no Python runs in an operation. On Gloo it would hang when an
abort meets an operation that is just beginning; Gloo has `RecoverableGroup`.

Giving a group of torch's own a fresh backend: whoever holds the group goes on with it.

A private hook: torch keeps one backend for each backend type of a group, and a second one registered under the same
type is ignored. The types behind the named ones are free, so each swap takes the next.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from axon_nb.engine.groups.abort import GroupBroken, raise_if_aborted, run_in_helper

__all__ = [
    "MAX_SWAPS",
    "Kind",
    "NativeGroups",
    "connect_in_helper",
    "meet",
    "swap_backend",
    "swaps_left",
]

_FIRST_TYPE = 7
_LAST_TYPE = 255
MAX_SWAPS = _LAST_TYPE - _FIRST_TYPE + 1
"""How often one group can get a fresh backend."""

_next_type: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


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


_PIECE_S = 0.02
_MEET_LIMIT_S = 30.0

c10d = dist.distributed_c10d


@dataclass(frozen=True, slots=True)
class Kind:
    """What differs between backends."""

    owns: Callable[[Any], bool]
    """Whether a backend is of this kind."""
    connect: Callable[[Store, dist.ProcessGroup, list[int], timedelta, torch.device], Any]
    """A fresh connected backend for a group, given its store, itself, its global ranks, the limit of its operations and
    the device; called in a helper thread."""
    abort: Callable[[Any], None]
    """End all that a backend does; any thread."""
    connect_limit_s: float
    """Seconds that connecting may take once all peers are there."""


class NativeGroups:
    """The groups of one kind on this rank.

    Args:
        kind: How they are connected and aborted.
        root: The store that all ranks reach; each forming uses a prefix of its own.
        device: Where this rank computes.
        timeout: Limit of the groups' operations.
    """

    def __init__(self, kind: Kind, root: Store, *, device: torch.device, timeout: timedelta) -> None:
        self._kind = kind
        self._root = root
        self.device = device
        """Where this rank computes."""
        self._timeout = timeout
        self._aborted: list[Any] = []
        self._lock = threading.Lock()
        self.formed_at_ns = time.time_ns()
        """When the groups were last formed, in nanoseconds since 1970: what a recorder has from before is over."""

    def all(self) -> list[dist.ProcessGroup]:
        """The groups, by name: the same order on all ranks that share them."""
        groups = [group for group in list(c10d._world.pg_names) if self._kind.owns(self._backend(group))]
        return sorted(groups, key=lambda group: (len(group.group_name), group.group_name))

    def _backend(self, group: dist.ProcessGroup) -> Any:
        try:
            return group._get_backend(torch.device(self.device.type))
        except RuntimeError:  # it has none for this device
            return None

    def abort(self, *, limit_s: float) -> list[str]:
        """From any thread: end all that these groups do on this rank; each once until it is formed anew.

        Two communicators that are aborted one after the other can wait for each other, so each gets a thread.

        Args:
            limit_s: Seconds after which those that have not ended are left to themselves.

        Returns:
            Names of the groups that did not end in time.
        """
        jobs: list[tuple[str, threading.Thread]] = []
        with self._lock:
            for group in self.all():
                backend = self._backend(group)
                if any(backend is other for other in self._aborted):
                    continue
                self._aborted.append(backend)
                thread = threading.Thread(target=self._kind.abort, args=(backend,), name="axon_nb-abort", daemon=True)
                jobs.append((group.group_name, thread))
        for _, thread in jobs:
            thread.start()
        end = time.monotonic() + limit_s
        for _, thread in jobs:
            thread.join(max(0.0, end - time.monotonic()))
        return [name for name, thread in jobs if thread.is_alive()]

    def reform(self, epoch: int) -> int:
        """Give each group a fresh backend; collective over all ranks, on the main thread.

        A backend that was not aborted is aborted first: its peers' are gone.

        Args:
            epoch: The number of this forming, the same on all ranks.

        Returns:
            How many groups.

        Raises:
            Aborted: an abort came meanwhile.
            RuntimeError: a peer did not come, or did not connect.
        """
        late = self.abort(limit_s=self._kind.connect_limit_s)
        if late:
            raise RuntimeError(f"the communicators of groups {', '.join(late)} did not end")
        groups = self.all()
        for group in groups:
            ranks = dist.get_process_group_ranks(group)
            store = PrefixStore(f"epoch{epoch}/{group.group_name}/", self._root)
            meet(store, group.rank(), group.size(), give_up=raise_if_aborted)

            def build(store: Store = store, group: dist.ProcessGroup = group, ranks: list[int] = ranks) -> Any:
                return self._kind.connect(store, group, ranks, self._timeout, self.device)

            backend = connect_in_helper(
                build, give_up=raise_if_aborted, limit_s=self._kind.connect_limit_s, dispose=self._kind.abort
            )
            swap_backend(group, backend, self.device)
            if group is c10d._get_default_group():
                # Groups made from now on meet here: a name used before the abort finds no keys of then.
                name, _ = c10d._world.pg_map[group]
                c10d._world.pg_map[group] = (name, PrefixStore(f"epoch{epoch}/new/", self._root))
        self._aborted.clear()
        self.formed_at_ns = time.time_ns()
        return len(groups)


def meet(store: Store, rank: int, size: int, *, give_up: Callable[[], None], limit_s: float = _MEET_LIMIT_S) -> None:
    """Wait until all ranks of a group are here: what then connects cannot be ended, and is short.

    Args:
        store: A fresh prefix.
        rank: This process's rank in the group.
        size: Number of ranks in the group.
        give_up: Called every 20 ms; raises when the wait is to end.
        limit_s: Seconds to wait.

    Raises:
        RuntimeError: a rank did not come.
    """
    store.set(f"here{rank}", "1")
    waiting = set(range(size)) - {rank}
    end = time.monotonic() + limit_s
    while True:
        waiting = {peer for peer in waiting if not store.check([f"here{peer}"])}
        if not waiting:
            return
        if time.monotonic() > end:
            raise RuntimeError(f"group ranks {sorted(waiting)} did not come within {limit_s:g} s")
        give_up()
        time.sleep(_PIECE_S)


def connect_in_helper(
    build: Callable[[], Any], *, give_up: Callable[[], None], limit_s: float, dispose: Callable[[Any], None]
) -> Any:
    """What `build` returns, from a thread that is left behind when the wait ends before it.

    Args:
        build: Connects in C++, where nothing can end it.
        give_up: Called every 20 ms; raises when the wait is to end.
        limit_s: Seconds to wait.
        dispose: What to do with a backend that comes too late.

    Raises:
        RuntimeError: it took longer than the limit, or failed.
    """
    box: list[Any] = []
    lock, done, abandoned = threading.Lock(), threading.Event(), threading.Event()

    def work() -> None:
        try:
            result = build()
        except BaseException as error:
            result = error
        with lock:
            box.append(result)
            late = abandoned.is_set()
            done.set()
        if late and not isinstance(result, BaseException):
            dispose(result)

    run_in_helper(work)
    end = time.monotonic() + limit_s
    try:
        while not done.wait(_PIECE_S):
            give_up()
            if time.monotonic() > end:
                raise RuntimeError(f"connecting took longer than {limit_s:g} s")
    except BaseException:
        with lock:
            abandoned.set()
            if box and not isinstance(box[0], BaseException):
                run_in_helper(lambda: dispose(box[0]))
        raise
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]
